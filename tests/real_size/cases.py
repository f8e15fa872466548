"""The steps that are counted. Sizes are set by hand."""

from __future__ import annotations

from collections.abc import Mapping

from tests.real_size.step import Case

CASES: Mapping[str, Case] = {
    "two-layers-of-qwen2.5-7b": Case(shape="Qwen2.5-7B", ranks=8, layers=2),
    "two-layers-of-llama-3-8b": Case(shape="Llama-3-8B", ranks=8, algorithm="GRPO", layers=2),
    "two-layers-of-qwen3-32b": Case(
        shape="Qwen3-32B", ranks=32, layout={"tensor": 4}, tensor_generation=4, micro_batch_tokens=4096, layers=2
    ),
    "two-layers-of-llama-3-70b": Case(
        shape="Llama-3-70B",
        ranks=64,
        layout={"tensor": 8},
        tensor_generation=8,
        rows=2,
        micro_batch_tokens=4096,
        layers=2,
    ),
    "qwen2.5-7b-8": Case(shape="Qwen2.5-7B", ranks=8),
    "llama-3-8b-8": Case(shape="Llama-3-8B", ranks=8, algorithm="GRPO"),
    "qwen3-32b-32": Case(
        shape="Qwen3-32B", ranks=32, layout={"tensor": 4}, tensor_generation=4, rows=4, micro_batch_tokens=4096
    ),
    "llama-3-70b-64": Case(
        shape="Llama-3-70B", ranks=64, layout={"tensor": 8}, tensor_generation=8, rows=2, micro_batch_tokens=4096
    ),
}
