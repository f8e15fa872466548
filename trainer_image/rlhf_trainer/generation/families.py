"""Model families with which the trainer can generate, because it knows the layout of their weights in vLLM."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

GENERATED = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "granite", "gpt2"),
    *("qwen2_moe", "qwen3_moe", "olmoe"),
)
"""`model_type` of each family that can generate; tests/trainer/generation/test_every_family_is_generated_with.py."""
CPU_ATTENTION, HEAD_SIZES = "v1/attention/backends/cpu_attn.py", "get_supported_head_sizes"


def why_not_generated(config: PreTrainedConfig, *, on_cpu: bool) -> str:
    """Reason why models of a config cannot generate; empty if they can, or if this vLLM does not list head sizes."""
    if config.model_type not in GENERATED:
        known = ", ".join(GENERATED)
        return f"is a {config.model_type}, whose layout in vLLM this trainer does not know; it generates with {known}"
    sizes = [size for found in literals(CPU_ATTENTION, HEAD_SIZES) for size in found] if on_cpu else []
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if sizes and size not in sizes:
        return f"has heads of size {size}; on CPU vLLM generates with {', '.join(map(str, sizes))}"
    return ""


def literals(file: str, function: str) -> Iterator[Any]:
    """Yield the literals that a function in a source file of vLLM returns; an import would take seconds."""
    package = find_spec("vllm")
    path = Path(str(package.origin)).parent / file if package else Path(file)
    if not path.is_file():
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            with suppress(ValueError):
                yield from (
                    ast.literal_eval(last.value) for last in node.body if isinstance(last, ast.Return) and last.value
                )
