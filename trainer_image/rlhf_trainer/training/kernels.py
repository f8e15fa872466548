"""Fused kernels in place of torch's operations: the head's, and liger-kernel's of norms, rotary embeddings and MLPs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import GELUTanh, SiLUActivation

from rlhf_api.problems import choice
from rlhf_api.spec.job_spec import Kernels
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.training.context import moved
from rlhf_trainer.training.models import LanguageModel, inner

PACKAGES = {"triton": "triton", "liger_kernel": "liger-kernel"}
"""Import name -> name of the packages that fused kernels need."""
ROTARY = "apply_rotary_pos_emb"
"""Function by which a family's file of transformers applies rotary embeddings to queries and keys."""


@dataclass(frozen=True)
class NormKind:
    """Kind of a family's norms, by the arguments of LigerRMSNormFunction."""

    offset: float
    casting: str
    is_first: bool
    """Whether norms come before attention and MLP only; then no residual shares the gradient of a norm's output, and
    its memory can take the gradient of the input."""


LLAMA, GEMMA = NormKind(0.0, "llama", is_first=True), NormKind(1.0, "gemma", is_first=False)
FAMILIES: Mapping[str, NormKind] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), GEMMA),
}
"""Model types whose layers can be fused -> kind of their norms; tests compare each with its plain modules."""


def use_kernels(model: nn.Module, kernels: Kernels, *, device: torch.device) -> None:
    """Make a LanguageModel or Scorer compute by the kernels of `training.kernels`.

    Auto is Fused on a GPU with the packages, else Plain. Compiled layers, which torch.compile fuses, and layers of
    families that are not known stay plain. ConfigError for Fused where it cannot run.
    """
    lacking = _lacking_packages()
    if kernels == "Fused" and (lacking or device.type != "cuda"):
        reason = f"the package {lacking}, which is not installed" if lacking else "a GPU"
        raise ConfigError(f"spec.training.kernels: Fused needs {reason}; Auto takes what runs")
    if kernels == "Plain" or lacking or device.type != "cuda":
        return
    if isinstance(model, LanguageModel):
        from rlhf_trainer.training import head_kernels  # Triton is installed for GPUs only

        model.kernels = head_kernels
    pretrained = inner(model)
    is_compiled = any(each._compiled_call_impl for each in pretrained.modules())  # noqa: SLF001 there is no public name
    if pretrained.config.model_type in FAMILIES and not is_compiled:
        fuse_layers(pretrained)


def why_plain(config: PreTrainedConfig, *, is_elsewhere: bool) -> str:
    """Return why layers stay unfused on a GPU; empty if not. is_elsewhere: ignore the packages installed here."""
    if lacking := "" if is_elsewhere else _lacking_packages():
        return f"{lacking} is not installed"
    return "" if config.model_type in FAMILIES else f"fused kernels are for {choice(FAMILIES)}, not {config.model_type}"


def _lacking_packages() -> str:
    """Name the packages that fused kernels need and that are not installed; empty if none is missing."""
    return " and ".join(name for module, name in PACKAGES.items() if find_spec(module) is None)


def fuse_layers(pretrained: PreTrainedModel) -> None:
    """Make the norms, MLPs and attention modules of a known family compute by liger-kernel's functions."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    products = {SiLUActivation: LigerSiLUMulFunction, nn.SiLU: LigerSiLUMulFunction, GELUTanh: LigerGELUMulFunction}
    kind = FAMILIES[pretrained.config.model_type]
    modules: list[Any] = list(pretrained.modules())
    for module in modules:
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = partial(_norm, module, kind, module.forward)
        elif name.endswith("MLP") and type(module.act_fn) in products:
            module.forward = partial(_gated_mlp, module, products[type(module.act_fn)].apply)
        elif name.endswith("Attention"):
            module.forward = MethodType(_with_global(type(module).forward, ROTARY, _turned), module)


def _norm(module: Any, kind: NormKind, plain: Any, hidden: Tensor) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    if isinstance(hidden, DTensor):  # norms of heads that tensor-parallel ranks share
        return plain(hidden)  # type: ignore[no-any-return]
    epsilon = module.eps if hasattr(module, "eps") else module.variance_epsilon
    options = epsilon, kind.offset, kind.casting, kind.is_first
    normed = LigerRMSNormFunction.apply(moved(hidden, _wait, _wait), module.weight, *options)
    return moved(normed, _wait, _wait)


def _wait(given: Tensor) -> Tensor:
    """Wait for a tensor, or gradient, from a collective of a tensor-parallel module: Triton would not wait for it."""
    return given.wait() if isinstance(given, AsyncCollectiveTensor) else given


def _gated_mlp(module: Any, product: Any, hidden: Tensor) -> Tensor:
    return module.down_proj(product(module.gate_proj(hidden), module.up_proj(hidden)))  # type: ignore[no-any-return]


def _turned(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Apply rotary embeddings to queries and keys [1, heads, N, size] in place, by tables [1, N, size]."""
    from liger_kernel.ops.rope import LigerRopeFunction

    return LigerRopeFunction.apply(query, key, cos, sin)  # type: ignore[no-any-return]


def _with_global(function: Any, name: str, value: object) -> FunctionType:
    """Copy a function so that its global `name` is `value`; the module's own global, which other models use, stays."""
    copy = FunctionType(function.__code__, {**function.__globals__, name: value}, closure=function.__closure__)
    copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return copy
