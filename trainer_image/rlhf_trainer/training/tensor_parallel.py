"""Tensor parallelism by DTensor, as the model's plan in transformers says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf_api.problems import choice
from rlhf_mapper.architecture import CUT, architecture_of
from rlhf_trainer.training.lora import AdaptedLinear, shard_adapted
from rlhf_trainer.training.models import MissingLayer

HEADS_DIM = 2
"""Of activations [B, T, heads, head size], as the norms of queries and keys see them."""


STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": partial(SequenceParallel, sequence_dim=HEADS_DIM, use_local_output=True),
}
"""The styles of transformers that are supported -> those of torch."""


def plan_of(config: PreTrainedConfig) -> dict[str, str]:
    """Name of a module (with `*` for any layer) -> style of transformers; empty for a model without a plan.

    The plan of the class is taken: a loaded model's own plan also has embedding and head, which `shard_tensors` cuts as
    vLLM does.
    """
    return dict(getattr(type(config), "base_model_tp_plan", None) or {})


def shard_tensors(model: PreTrainedModel, axis: DeviceMesh) -> None:
    """Shard a causal language model or classifier over the ranks of `axis`, in place.

    Embedding and head are split along the vocabulary; of the head only the weight is used, see `head.likelihood`.
    """
    base: Any = model.base_model
    plan = plan_of(model.config)
    for name, module in list(base.named_modules()):
        for pattern, style in plan.items():
            if fnmatch(name, pattern):
                _shard(module, axis, STYLES[style]())
    if base.embed_tokens is not None:
        parallelize_module(base.embed_tokens, axis, RowwiseParallel(input_layouts=Replicate()))
    head = getattr(model, "lm_head", None)
    if head is not None and not isinstance(head, MissingLayer):
        parallelize_module(head, axis, ColwiseParallel())
        if base.embed_tokens is not None and model.config.tie_word_embeddings:
            head.weight = base.embed_tokens.weight


def _shard(module: nn.Module, axis: DeviceMesh, style: ParallelStyle) -> None:
    if isinstance(module, AdaptedLinear):
        shard_adapted(module, axis, style)
    else:
        parallelize_module(module, axis, style)


def impossible_sizes(config: PreTrainedConfig, *, pipeline: int, tensor: int) -> str:
    """Why a model cannot be cut into so many stages and shards, as `pipeline is 3, ...`; empty if it can."""
    if pipeline > 1 and config.model_type not in CUT:
        return f"pipeline is {pipeline}, but only {choice(CUT)} can be cut into stages, not {config.model_type}"
    if tensor > 1:
        styles = plan_of(config)
        if styles and architecture_of(config.to_dict()).experts > 1:
            return f"tensor is {tensor}, but the model ({config.model_type}) is a mixture of experts, which is not cut"
        unknown = sorted({style for style in styles.values() if style not in STYLES})
        if not styles or unknown:
            what = f"cuts layers by {', '.join(unknown)}, which is not supported" if unknown else "does not say how"
            return f"tensor is {tensor}, but the model ({config.model_type}) cannot be cut: transformers {what}"
    wrong = architecture_of(config.to_dict()).cannot_be_cut(pipeline=pipeline, tensor=tensor)
    return " ".join(wrong) if wrong else ""
