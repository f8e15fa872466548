"""Memory of a GPU in bytes: states of its models, and the bytes that a phase adds at its fullest moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import Software
from rlhf_mapper.kernels import Numbers
from rlhf_mapper.simulate import layer
from rlhf_mapper.simulate.layouts import Layouts

HOST_SHARE = 0.5
"""Share of a GPU's host memory that offloaded states may fill; a guess, since Ray and other programs need the rest."""
MAX_SINGLE_UNIT_BYTES = 32 * 2**20
"""Largest bytes of a pipeline stage that FSDP2 gathers as a whole (`rlhf_trainer.training.sharding`)."""
MAX_ROUNDED = 2**20
"""Largest bytes of a pinned block that torch rounds up to a power of two (`rlhf_trainer.run.slots`)."""
WHOLE_GRADIENTS = 0.1
"""Share of a GPU's memory that whole gradients may take beyond their shards (`rlhf_trainer.training.optimizer`)."""
RESHARD_BUCKETS, BUCKET, BUCKETS_OF_A_MODEL = 3, 512 * 2**20, 48
"""Buckets that a reshard holds, bytes of the largest, fewest buckets of a model (`rlhf_trainer.hybrid_engine`)."""

Part = Literal["weights", "gradients", "optimizer", "activations", "generator", "kv_cache"]


class Moment(NamedTuple):
    """Moment of a phase at which memory may be fullest: fixed bytes of a GPU, and bytes per token of a micro-batch."""

    fixed: Numbers
    of_a_token: Numbers


@dataclass(frozen=True, kw_only=True)
class Update:
    """Properties of a model's update that decide its memory."""

    recomputes: bool
    """Whether only the inputs of layers are kept, and the backward pass recomputes one layer at a time."""
    accumulates: bool
    """Whether an update has several micro-batches, so that gradients of the first wait for the last."""
    in_host: bool = False
    """Whether gradients leave the GPU as soon as they are summed (`OptimizerInHost`)."""
    trained_share: float = 1.0
    """Share of the parameters that have gradients."""
    gpu_memory: float
    """Bytes of the GPU's memory, by which the trainer decides whether to keep whole gradients or only shards."""


def usable(software: Software, gpu_memory: float, gpus: NDArray[Any] | float, *, generates: bool) -> Numbers:
    """Return the bytes of a GPU that states, activations and the KV cache may fill together, by pool size.

    generates: whether the generator has CUDA graphs there. The generator's own share (`gpu_memory_utilization`) refers
    to all memory of the GPU instead.
    """
    reserve = software.reserve
    held = reserve.context + reserve.nccl * (np.asarray(gpus) > 1) + reserve.graphs * generates
    free: Numbers = np.maximum(gpu_memory - held, 0.0) * (1 - reserve.fragmented)
    return free


def states(
    model: Architecture, software: Software, *, trains: bool, trained_share: float = 1.0, compresses: bool = False
) -> dict[Part, float]:
    """Return the bytes of a model's states over all GPUs of a replica; gradients only if they are always in memory.

    trained_share: share of the parameters that is trained (`Work.trained_share`); compresses: see `Work.compresses`.
    """
    frozen, trained = model.parameters * software.frozen_bytes, model.parameters * trained_share
    if not trains:
        return {"weights": frozen}
    held: dict[Part, float] = {
        "weights": trained * software.weight_bytes + frozen * (trained_share < 1),
        "optimizer": trained * (software.optimizer_bytes + layer.FLOAT * compresses),
    }
    return held if software.shards_weights else {**held, "gradients": trained * software.gradient_bytes}


def parts_of_gpu(
    states: Mapping[Part, float], software: Software, *, replica: Numbers | float, gpus: Numbers
) -> dict[Part, Numbers]:
    """Return a GPU's bytes of each state: all bytes / `gpus` if data ranks shard the state, else / `replica` (p t)."""
    shared = {part for part in states if software.shards_weights or part == "optimizer"}
    return {part: size / (gpus if part in shared else replica + 0 * gpus) for part, size in states.items()}


def pinned(model: Architecture, sizes: Sequence[float], gpus: Numbers) -> Numbers:
    """Return the bytes of pinned host memory that a GPU's part of a model's matrices takes when it is offloaded.

    sizes: bytes of a parameter for each state. Torch takes pinned memory for each matrix, up to 1 MiB in powers of two.
    """
    counts, matrices = np.array(model.matrices, dtype=float).T
    parts = np.maximum(np.multiply.outer(sizes, matrices)[:, :, None] / gpus, 1.0)
    blocks = np.where(parts > MAX_ROUNDED, parts, 2.0 ** np.ceil(np.log2(parts)))
    return np.asarray((blocks * counts[:, None]).sum(axis=(0, 1)))


def fullest(moments: Sequence[Moment], tokens: Numbers | float) -> Numbers:
    """Return the bytes of a GPU at the fullest of the moments, with micro-batches of `tokens` tokens."""
    return reduce(np.maximum, (each.fixed + each.of_a_token * tokens for each in moments))


def most_tokens(moments: Sequence[Moment], room: Numbers | float) -> Numbers:
    """Return the most tokens of a micro-batch with which every moment fits in `room` bytes; negative: none fits."""
    with np.errstate(divide="ignore", invalid="ignore"):  # without bytes per token any number fits, or none
        return reduce(np.fmin, ((room - each.fixed) / each.of_a_token for each in moments))


def reshard_bytes(software: Software, generator_bytes: Numbers) -> Numbers:
    """Return the bytes of the buffers that move weights from training to the generator."""
    bucket = np.minimum(BUCKET, generator_bytes / BUCKETS_OF_A_MODEL)
    return RESHARD_BUCKETS * bucket * software.shards_weights


def reading(model: Architecture, software: Software, layouts: Layouts, longest: Numbers | float) -> list[Moment]:
    """Return moments of forward passes at which memory may be fullest.

    longest: most response tokens of a rank in one micro-batch; the head computes only these.
    """
    if not software.shards_weights:
        return [_whole(model, layouts, layer.kept(model, software).on(model, layouts))]
    found = []
    busy = layer.forward_peak(model, software).on(model, layouts)
    for stage in _stages(model, software, layouts, longest):
        last = stage.has_head * stage.of_a_token
        found += [
            Moment(2 * (stage.root + stage.layer), 0 * busy),  # all-gathers, and copies of the gathered weights
            Moment(stage.root + 2 * stage.layer, busy),
            Moment(stage.root + stage.chunk, last),
        ]
    return found


def updating(
    model: Architecture, software: Software, layouts: Layouts, longest: Numbers | float, how: Update
) -> list[Moment]:
    """Return the moments of an update that may be fullest: backward passes, and the sum of the root's gradients.

    1F1B: the first stage holds p micro-batches, and the last stage holds 1. FSDP2 gathers a layer while it computes
    with another, and keeps the root (embedding and head) gathered. Gradients of a layer are summed over ranks in
    float32 while the next layer has its backward pass.
    """
    of_layer = layer.kept(model, software).on(model, layouts)
    # With FSDP each tensor-parallel rank keeps its part of the tokens between layers.
    inputs = software.compute_bytes * model.hidden / (layouts.t if software.shards_weights else 1 + 0 * layouts.t)
    layers = np.ceil(model.layers / layouts.p)
    if not software.shards_weights:
        held = inputs * layers * layouts.p + of_layer if how.recomputes else of_layer * layers * layouts.p
        return [_whole(model, layouts, held)]
    found, ratio = [], how.trained_share * software.gradient_bytes / software.compute_bytes
    busy = layer.backward_peak(model, software).on(model, layouts)
    for stage in _stages(model, software, layouts, longest):
        gradients = _gradients(stage, software, layouts, how)
        busy_with = stage.root + 2 * stage.layer - stage.experts + stage.head
        of_others = gradients.in_sum * (1 - stage.experts / np.maximum(stage.layer, 1.0))
        # the head's gradient in float32, beside a chunk of logits and then its copy in the compute type
        at_head = (
            gradients.waiting + stage.root + stage.layer + ratio * stage.head + np.maximum(stage.chunk, stage.head)
        )
        of_root = (1 + ratio + ratio / layouts.shards) * stage.root + ratio * stage.layer
        each, again = (inputs, of_layer) if how.recomputes else (of_layer, 0 * of_layer)
        alive = stage.in_flight * layers * each
        left = np.maximum(gradients.waiting, gradients.shards)
        found += [
            Moment(gradients.waiting + busy_with, alive + again + busy),
            Moment(gradients.waiting + of_others + busy_with, alive - each + again + busy),
            Moment(left + of_others + busy_with, inputs + of_layer + busy),
            # experts whose gradients are in the sum have freed their activations
            Moment(gradients.waiting + gradients.in_sum + busy_with, alive - each),
            Moment(left + gradients.in_sum + busy_with, inputs),
            Moment(at_head, alive + stage.of_a_token),
            Moment(gradients.shards + gradients.of_root + of_root, 0 * busy),
        ]
    return found


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """First or last stage of a pipeline: bytes of its weights in the compute type, gathered from all data ranks."""

    root: Numbers
    """Bytes of the weights that stay gathered: embedding and head on the stage, and all layers of a small stage."""
    head: Numbers
    """Bytes of the output head's weight, whose gradient waits for the embedding's."""
    layer: Numbers
    experts: Numbers
    """Part of `layer` for experts, if they are gathered apart; a backward pass gathers those of one layer at a time."""
    layers: Numbers
    """Bytes of the weights of all layers that are gathered one by one."""
    shards: Numbers
    """Bytes of these layers that all FSDP ranks hold together, each its shards; they include all experts."""
    has_head: Numbers
    chunk: Numbers
    """Bytes for the logits of as many tokens as the head takes at once."""
    of_a_token: Numbers
    """Bytes of each token for the final norm, which tensor ranks share, and the input of the head."""
    in_flight: Numbers
    """Number of micro-batches whose activations the stage holds at the same time."""


def _stages(model: Architecture, software: Software, layouts: Layouts, longest: Numbers | float) -> list[_Stage]:
    size, alone = software.compute_bytes, (layouts.p == 1).astype(float)
    embedding = model.vocabulary * model.hidden * size / layouts.t
    head = model.head_parameters * size / (1 if model.scores else layouts.t)
    tied = model.tied and not model.scores
    one = layouts.layer_parameters(model) * size
    layers = one * np.ceil(model.layers / layouts.p)
    logits = np.minimum(0 if model.scores else longest * model.vocabulary / layouts.t, software.chunk_logits)
    chunk = 2 * layer.FLOAT * logits
    # FSDP gathers experts apart from a layer's other weights (`ParallelSizes.cuts_experts`)
    apart = False if layouts.e is None else np.greater(layouts.e, 1.0) | np.greater(layouts.t, 1.0)
    found = []
    for first in (True, False):
        has_head = alone if first else 1 + 0 * alone
        root = embedding * (1 if first else alone) + head * has_head * (1 - alone * tied)
        large = root + layers > MAX_SINGLE_UNIT_BYTES
        found.append(
            _Stage(
                root=np.where(large, root, root + layers),
                head=head * has_head,
                layer=one * large,
                experts=layouts.own_experts(model) * size * apart * large,
                layers=layers * large,
                shards=model.layer_parameters * size / layouts.t * np.ceil(model.layers / layouts.p) * large,
                has_head=has_head,
                chunk=chunk * has_head,
                of_a_token=model.hidden * (2 * size + (layer.FLOAT + 2 * size) / layouts.t),
                in_flight=layouts.p if first else 1 + 0 * layouts.p,
            )
        )
    return found


class _Gradients(NamedTuple):
    """Bytes of a stage's gradients in float32."""

    waiting: Numbers
    """Gradients that earlier micro-batches of the mini-batch have left on a GPU, for the next ones to add to."""
    of_root: Numbers
    """Part of `waiting` for the weights in `_Stage.root`: embedding, head and, in a small stage, all layers."""
    shards: Numbers
    """A GPU's shards of the gradients of the stage's layers, after the sum over the ranks."""
    in_sum: Numbers
    """Whole gradients of one layer during the sum over the ranks; 0 if `waiting` keeps whole gradients."""


def _gradients(stage: _Stage, software: Software, layouts: Layouts, how: Update) -> _Gradients:
    ratio = how.trained_share * software.gradient_bytes / software.compute_bytes
    whole, share = ratio * (stage.layers + stage.root), (not how.in_host) / layouts.shards
    own = share * ratio * (stage.shards + stage.root)
    few = whole - own <= WHOLE_GRADIENTS * how.gpu_memory
    waiting = np.where(few, whole, own) * how.accumulates
    of_root = np.where(few, 1.0, share) * how.accumulates * ratio * stage.root
    in_sum = ratio * stage.layer * (1 - few * how.accumulates)
    return _Gradients(waiting, of_root, share * ratio * stage.shards, in_sum)


def _whole(model: Architecture, layouts: Layouts, of_a_token: Numbers) -> Moment:
    """Return the fullest moment if data ranks do not shard weights: activations, and float32 logits and gradients."""
    logits = (1 if model.scores else model.vocabulary) / layouts.t * 2 * layer.FLOAT
    return Moment(0.0 * layouts.gpus, of_a_token + logits + 0.0 * layouts.gpus)
