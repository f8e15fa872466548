"""Model families with which the trainer can generate, because it knows the layout of their weights in vLLM."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_api.spec.rollout import Rollout
from rlhf_api.tables import read_table
from rlhf_mapper.architecture import experts_in, positions_of
from rlhf_trainer.errors import ConfigError

if TYPE_CHECKING:  # a run reads the table before it imports transformers
    from transformers import PreTrainedConfig

FAMILIES = read_table(__package__, "families.yaml", dict[str, tuple[str, ...]])
GENERATED = (*FAMILIES["by_vllm"], *FAMILIES["by_transformers"])
"""All families that can generate; tests/trainer/generation/test_every_family_is_generated_with.py."""
OWN_CLASS = "AutoModelForCausalLM"
"""Key of a config's `auto_map` for the class of a language model in a Python file of the model's folder."""
CPU_ATTENTION, HEAD_SIZES = "v1/attention/backends/cpu_attn.py", "get_supported_head_sizes"
ROPE_FIELDS: Mapping[str, Sequence[str]] = {
    "longrope": ("factor", "attention_factor", "short_mscale", "long_mscale"),
    "dynamic": ("alpha", "max_trained_positions"),
}
"""Type of RoPE -> fields that either transformers or vLLM's own models read, but not both."""


def why_not_generated(
    config: PreTrainedConfig, *, on_cpu: bool, elsewhere: bool = False, trust_remote_code: bool = False
) -> str:
    """Say why models of a config cannot generate; empty if they can.

    elsewhere: whether external servers generate. Head sizes are checked on CPU only, and only if vLLM lists some.
    """
    reason = why_unknown(config.model_type, getattr(config, "auto_map", None), trust_remote_code=trust_remote_code)
    is_own = not uses_modules(config, trust_remote_code=trust_remote_code)
    if reason := reason or _why_computed_otherwise(config, is_own=is_own, elsewhere=elsewhere):
        return reason
    sizes = [size for found in literals(CPU_ATTENTION, HEAD_SIZES) for size in found] if on_cpu else []
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if sizes and size not in sizes:
        return f"has heads of size {size}; on CPU vLLM generates with {', '.join(map(str, sizes))}"
    return ""


def must_quantize(rollout: Rollout, config: PreTrainedConfig, *, on_cpu: bool, elsewhere: bool = False) -> None:
    """Raise ConfigError if generators cannot have 8-bit types of `rollout`; elsewhere: they run on another machine."""
    import torch

    kind, cpu = rollout.quantization, torch.cpu.get_capabilities() if on_cpu and not elsewhere else {}
    is_x86 = cpu.get("architecture") == "x86_64"
    if kind == "FP8" and on_cpu:
        raise ConfigError("spec.rollout.quantization: is FP8, for which vLLM has no kernel on CPU; use Int8")
    if kind and experts_in(config.to_dict()):
        raise ConfigError(f"spec.rollout.quantization: is {kind}, but the weights of experts are not quantised here")
    if kind and is_x86 and not (cpu["avx512_vnni"] or cpu["avx_vnni"]):
        raise ConfigError(f"spec.rollout.quantization: is {kind}, but vLLM computes it wrongly on a CPU without VNNI")
    if rollout.kv_cache and is_x86 and not cpu["avx512_f"]:
        raise ConfigError("spec.rollout.kvCache: is FP8, for which vLLM needs AVX-512 on CPU, and this CPU has none")


def why_no_draft(config: PreTrainedConfig, actor: PreTrainedConfig, *, tokens: int, on_cpu: bool) -> str:
    """Say why models of a config cannot draft for an actor; empty if they can. tokens: of prompt and response."""
    if config.model_type not in FAMILIES["by_vllm"]:
        return f"is a {config.model_type}; vLLM drafts with {', '.join(FAMILIES['by_vllm'])}"
    if reason := why_not_generated(config, on_cpu=on_cpu):
        return reason
    if config.vocab_size != actor.vocab_size:
        return f"has a vocabulary of {config.vocab_size} tokens, and the actor's has {actor.vocab_size}"
    most = positions_of(config.to_dict()) or tokens
    needed = f"reads {most} tokens at most; maxPromptTokens + maxResponseTokens is {tokens}"
    return needed if tokens > most else ""


def uses_modules(config: PreTrainedConfig, *, trust_remote_code: bool) -> bool:
    """Whether vLLM's Transformers backend serves models of a config, with the modules that the trainer trains."""
    is_own = has_own_class(getattr(config, "auto_map", None), trust_remote_code=trust_remote_code)
    return is_own or config.model_type in FAMILIES["by_transformers"]


def has_own_class(auto_map: Collection[str] | None, *, trust_remote_code: bool) -> bool:
    """Whether a model's class is in a Python file of its folder that may run; auto_map: of the model's config."""
    return trust_remote_code and OWN_CLASS in (auto_map or ())


def why_unknown(model_type: str, auto_map: Collection[str] | None, *, trust_remote_code: bool) -> str:
    """Say why models of a type cannot generate; empty for a type of `GENERATED`, and for a model's own class."""
    is_own = has_own_class(auto_map, trust_remote_code=trust_remote_code)
    known = "" if is_own or model_type in GENERATED else ", ".join(GENERATED)
    return known and f"is a {model_type}, whose layout in vLLM this trainer does not know; it generates with {known}"


def _why_computed_otherwise(config: PreTrainedConfig, *, is_own: bool, elsewhere: bool) -> str:
    """Say why vLLM would compute otherwise than the trainer; is_own: vLLM has its own model of the family."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    one_sided = [name for name in ROPE_FIELDS.get(kind, ()) if rope.get(name) is not None]
    if one_sided if is_own else kind == "longrope":
        return f"has RoPE of type {kind} with {', '.join(sorted(rope))}, which vLLM computes in another way"
    if elsewhere and (kind == "longrope" or not is_own):  # a server may have another length, and lacks our patches
        return "generates only in the job's own engines, and spec.rollout.endpoints names servers"
    return ""


def literals(file: str, function: str) -> Iterator[Any]:
    """Yield the literals that a function in a source file of vLLM returns, without an import, which takes seconds."""
    package = find_spec("vllm")
    path = Path(str(package.origin)).parent / file if package else Path(file)
    if not path.is_file():
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            with suppress(ValueError):
                returned = (last.value for last in node.body if isinstance(last, ast.Return) and last.value)
                yield from map(ast.literal_eval, returned)
