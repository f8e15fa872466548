"""The steps that are counted. Sizes are set by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tests.real_size.step import Case

QWEN_7B = Case(shape="Qwen2.5-7B", ranks=8)
LLAMA_8B = Case(shape="Llama-3-8B", ranks=8, algorithm="GRPO")
QWEN_32B = Case(shape="Qwen3-32B", ranks=32, layout={"tensor": 4}, tensor_generation=4, micro_batch_tokens=4096)
STAGES_32B = replace(QWEN_32B, layout={"pipeline": 2, "tensor": 4})
LLAMA_70B = Case(
    shape="Llama-3-70B", ranks=64, layout={"tensor": 8}, tensor_generation=8, rows=2, micro_batch_tokens=4096
)
SMALL_MIXTURE = Case(
    shape="Qwen3-30B-A3B",
    ranks=16,
    algorithm="GRPO",
    layout={"expert": 8},
    tensor_generation=1,
    scored_by_model=False,
    reshards=False,
)
LARGE_MIXTURE = replace(SMALL_MIXTURE, shape="Qwen3-235B-A22B", ranks=128)
DEEPSEEK = replace(SMALL_MIXTURE, shape="DeepSeek-V3", ranks=256, layout={"expert": 64})
LONG_8B = Case(
    shape="Qwen3-8B",
    ranks=8,
    algorithm="GRPO",
    layout={"context": 8},
    rows=2,
    prompt=1024,
    response=131072 - 1024,
    micro_batch_tokens=16384,
    scored_by_model=False,
)
LONG_70B = replace(
    LONG_8B,
    shape="Llama-3-70B",
    ranks=64,
    layout={"tensor": 8, "context": 8},
    tensor_generation=8,
    response=65536 - 1024,
    micro_batch_tokens=8192,
)
IN_HOST = replace(LLAMA_8B, ranks=1, rows=8, offload="OptimizerInHost")

ALONE: Mapping[str, Case] = {
    f"qwen2.5-1.5b-1-{tokens // 1024}k{'' if recompute else '-kept'}": Case(
        shape="Qwen2.5-1.5B",
        ranks=1,
        algorithm="GRPO",
        rows=8,
        micro_batch_tokens=tokens,
        recompute=recompute,
    )
    for tokens, recompute in ((4096, True), (8192, True), (16384, True), (4096, False))
} | {
    "qwen2.5-7b-1-8-layers-16k": Case(
        shape="Qwen2.5-7B", layers=8, ranks=1, algorithm="GRPO", rows=8, micro_batch_tokens=16384
    )
}
"""One GPU, so that a single one can be held against them (tests/gpu); `kept`: activations are not recomputed."""

OF_THREE_LAYOUTS = ((8, 1), (16, 2), (16, 4))
"""(ranks, of which so many tensor-parallel)."""
MAPPED: Mapping[str, Case] = {
    f"mapped-{shape.lower()}-{number}": Case(
        shape=shape,
        layers=6,
        recompute=number != 1,
        rows=4 if number else 8,
        micro_batch_tokens=8192,
        ranks=ranks,
        layout={"tensor": tensor} if tensor > 1 else {},
        tensor_generation=tensor,
    )
    for shape in ("Qwen2.5-7B", "Llama-3-8B", "Qwen3-32B", "Llama-3-70B", "Qwen3-8B", "Llama-2-7B")
    for number, (ranks, tensor) in enumerate(OF_THREE_LAYOUTS)
}
"""Six shapes in three layouts, with and without recomputation, in one or two micro-batches: for the mapper's memory."""

CASES: Mapping[str, Case] = {
    "two-layers-of-qwen2.5-7b": replace(QWEN_7B, layers=2),
    "two-layers-of-llama-3-8b": replace(LLAMA_8B, layers=2),
    "qwen2.5-7b-8": QWEN_7B,
    "qwen2.5-7b-8-last-rank": replace(QWEN_7B, rank=7),
    "llama-3-8b-8": LLAMA_8B,
    "llama-3-8b-1-optimizer-in-host": IN_HOST,
    "llama-3-8b-2-optimizer-in-host": replace(IN_HOST, ranks=2),
    "qwen3-32b-32": QWEN_32B,
    "qwen3-32b-32-first-stage": STAGES_32B,
    "qwen3-32b-32-last-stage": replace(STAGES_32B, rank=31),
    "llama-3-70b-64": LLAMA_70B,
    "llama-3-70b-64-last-rank": replace(LLAMA_70B, rank=63),
    **ALONE,
    "qwen3-30b-a3b-16": SMALL_MIXTURE,
    "four-layers-of-qwen3-30b-a3b": replace(SMALL_MIXTURE, layers=4),
    "four-layers-of-qwen3-30b-a3b-32k": replace(SMALL_MIXTURE, layers=4, rows=16, micro_batch_tokens=32768),
    "four-layers-of-qwen3-235b-a22b": replace(LARGE_MIXTURE, layers=4),
    "qwen3-235b-a22b-128": LARGE_MIXTURE,
    "deepseek-v3-256": DEEPSEEK,
    "six-layers-of-deepseek-v3": replace(DEEPSEEK, layers=6),
    "qwen3-8b-8-131k": LONG_8B,
    "four-layers-of-qwen3-8b-131k": replace(LONG_8B, layers=4),
    "llama-3-70b-64-65k": LONG_70B,
    "four-layers-of-llama-3-70b-65k": replace(LONG_70B, layers=4),
    "rehearsal": Case(shape="Qwen2.5-0.5B", ranks=1, algorithm="GRPO", layers=2, rows=8, prompt=16, response=16),
}
