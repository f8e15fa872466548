"""Which models vLLM generates with, read off its source: importing it takes seconds that a check has not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

REGISTRY, TABLES = "model_executor/models/registry.py", ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
CPU_ATTENTION, HEAD_SIZES = "v1/attention/backends/cpu_attn.py", "get_supported_head_sizes"


def why_not_generated(config: PreTrainedConfig, *, on_cpu: bool) -> str:
    """Why vLLM cannot generate with a model; empty if it can, or if this vLLM does not say."""
    known = {name for table in TABLES for names in literals(REGISTRY, table) for name in names}
    named = config.architectures or []
    if known and named and not known & set(named):
        return f"is {named[0]}, and vLLM generates with no such model"
    sizes = [size for found in literals(CPU_ATTENTION, HEAD_SIZES) for size in found] if on_cpu else []
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if sizes and size not in sizes:
        return f"has heads of size {size}; on CPU vLLM generates with {', '.join(map(str, sizes))}"
    return ""


def literals(file: str, name: str) -> Iterator[Any]:
    """What a file of vLLM assigns to a name, or returns by a function of that name, where that is a literal."""
    package = find_spec("vllm")
    path = Path(str(package.origin)).parent / file if package else Path(file)
    if not path.is_file():
        return
    for node in ast.walk(ast.parse(path.read_text())):
        with suppress(ValueError):
            if isinstance(node, ast.Assign) and any(ast.unparse(target) == name for target in node.targets):
                yield ast.literal_eval(node.value)
            elif isinstance(node, ast.FunctionDef) and node.name == name:
                yield from (
                    ast.literal_eval(last.value) for last in node.body if isinstance(last, ast.Return) and last.value
                )
