"""Coefficients of the simulators: shares of hardware peaks that kernels and links reach, and overheads of software."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import Literal, Self

from rlhf_api.spec.job_spec import Attention, Kernels
from rlhf_api.spec.rollout import Rollout
from rlhf_api.tables import read_table
from rlhf_mapper.mapping import Device, Phase

Layers = Literal["Plain", "Fused", "Megatron"]
ErrorKind = Literal["Sync", "Async", "Experts", "Training"]
"""Kind of job, for its prediction errors: RL in turn, RL that works ahead, a mixture of experts, no generation."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of hardware peaks that programs reach, and overheads in seconds that no bandwidth explains."""

    kernel: float
    """Share of measured kernels' speed, or of peak FLOP/s, that products and attention of an update reach."""
    scoring: float
    """Share as in `kernel`, in a forward pass without gradients."""
    prefill: float
    """Share as in `kernel`, in a prompt's pass through the generator."""
    balance: float
    """Share of the seconds of an update or a scoring pass of RL that kernels explain; uneven rows take the rest."""
    rollout: float
    """Share of a generation phase that decode steps and prefills explain; wake-up and uneven replicas take the rest."""
    memory: float
    """Share of memory bandwidth that reads of weights, activations and the KV cache reach."""
    link: float
    """Share of the bandwidth between the GPUs of a node that collectives reach."""
    network: float
    """Share of a node's network bandwidth that collectives reach."""
    decode_seconds: float
    """Seconds of the generator's own code in a decode step."""
    sequence_seconds: float
    """Seconds of the generator's own code in a decode step, for each sequence."""
    update_seconds: float
    """Seconds of the trainer's own code in a mini-batch update."""
    call_seconds: float
    """Seconds of the controller's and the trainer's own code in a call of a model."""
    stage_seconds: float
    """Seconds of a hand-over between pipeline stages, besides the transfer: launch code, and uneven stages."""
    transition_seconds: float
    """Seconds of a transition, besides the transfer: waking the generator and laying out its memory."""


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """Memory of a device that is not for states, activations and the KV cache, in bytes but for a share."""

    context: float
    """Bytes of the CUDA context with its kernels and the workspace of cuBLAS."""
    nccl: float
    """Bytes of NCCL's buffers on a GPU that talks to others."""
    graphs: float
    """Bytes of the generator's CUDA graphs."""
    fragmented: float
    """Share of the rest that is lost between the blocks of torch's allocator."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """Properties of the training and generation programs that decide their memory and speed."""

    name: str
    layers: Layers
    """Layers of training and scoring: transformers' own modules with a kernel for each operation, with fused norms,
    rotary embeddings, gated MLPs and heads (liger-kernel), or Megatron's."""
    products: Literal["Measured", "Roofline"]
    """Source of the seconds of matrix products, attention and collectives in 16 bits: measured kernels, or peaks."""
    attention: Literal["Flash", "SDPA"]
    """Attention kernels of training and scoring."""
    shards_weights: bool
    """Whether data-parallel ranks shard weights and gradients too (FSDP, ZeRO-3), or the optimizer alone (ZeRO-1).

    If true, gradients exist only while their model is updated, and the head never computes the logits of all tokens
    at once.
    """
    weight_bytes: int | float
    """Bytes of the weight of one parameter in a trained model."""
    gradient_bytes: int | float
    optimizer_bytes: int | float
    frozen_bytes: int | float
    """Bytes of the weight of one parameter in a frozen model."""
    compute_bytes: int | float
    """Bytes of a number in matrix products, activations and the KV cache."""
    linear_bytes: int = 0
    """Bytes of a weight of the generator's linear layers; 0: `compute_bytes`."""
    cache_bytes: int = 0
    """Bytes of an element of the generator's KV cache; 0: `compute_bytes`."""
    rereads_kv: bool
    """Whether the generator reads a KV head's cache once for each of its query heads (vLLM 0.3), not once for all."""
    chunk_logits: int
    """Largest number of logits in a chunk of the output head on a rank (`rlhf_trainer.training.head`)."""
    running_sequences: int
    """Largest number of sequences that one generator decodes at once."""
    may_offload: bool
    """Whether the states of idle models may be moved to host memory."""
    state_share: float
    """Largest share of a GPU's memory that model states (weights, gradients, optimizer) may fill."""
    errors: Mapping[ErrorKind, tuple[float, float]]
    """Bounds of published / predicted seconds by kind of job (`rlhf_mapper.prediction.error_kind`)."""
    reserve: Reserve
    efficiency: Efficiency


@dataclass(frozen=True)
class Correction:
    """Correction factors by phase: measured over predicted seconds; 1 where nothing was measured."""

    factors: dict[Phase, float] = field(default_factory=dict)

    def of(self, phase: Phase) -> float:
        return self.factors.get(phase, 1.0)

    @classmethod
    def mean(cls, several: Sequence[Self]) -> Self:
        """Return the geometric mean of several corrections; a phase counts where it was measured."""
        found: dict[Phase, list[float]] = {}
        for phase, factor in (item for each in several for item in each.factors.items()):
            found.setdefault(phase, []).append(factor)
        return cls({phase: geometric_mean(factors) for phase, factors in found.items()})


_SOFTWARE = read_table(__package__, "software.yaml", dict[Device, Software])
TRAINER = _SOFTWARE["GPU"]


def software_for(
    device: Device,
    precision: Literal["Auto", "FP32", "BF16"],
    attention: Attention = "Auto",
    kernels: Kernels = "Plain",
    rollout: Rollout | None = None,
) -> Software:
    """Return the Software of this project's trainer on a device; rollout: says whether the generator is quantised.

    Auto: FP32 and SDPA on CPU, BF16 and Flash on GPU, fused kernels on GPU.
    """
    full = precision == "FP32" or (precision == "Auto" and device == "CPU")
    size, on_device = (4 if full else 2), _SOFTWARE[device]
    attention = "SDPA" if attention == "SDPA" or full else on_device.attention
    fused = device == "GPU" and not full and kernels != "Plain"
    return replace(
        on_device,
        layers="Fused" if fused else "Plain",
        products="Roofline" if full else on_device.products,
        compute_bytes=size,
        frozen_bytes=size,
        attention=attention,
        linear_bytes=1 if rollout and rollout.quantization else 0,
        cache_bytes=1 if rollout and rollout.kv_cache else 0,
    )
