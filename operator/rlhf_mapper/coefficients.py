"""The numbers by which the simulators differ from peaks: how well kernels and links do, and what software costs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from rlhf_mapper.mapping import Device, Kind


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of a peak that are reached, and times that no bandwidth explains."""

    kernel: float
    """Of peak FLOP/s, by matrix products."""
    memory: float
    """Of memory bandwidth, by what reads weights, activations and the KV cache."""
    link: float
    """Of the bandwidth between the GPUs of a node, by collectives."""
    network: float
    """Of a node's network, by collectives."""
    decode_seconds: float
    """Of the generator's own code, a decode step."""
    sequence_seconds: float
    """Of the generator's own code, a decode step and sequence."""
    update_seconds: float
    """Of the trainer's own code, a mini-batch update."""
    call_seconds: float
    """Of the controller and the trainer's own code, a call of a model."""
    transition_seconds: float
    """Of a transition, besides its transfer: waking the generator and laying out its memory."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """How the programs that train and generate are built."""

    shards_weights: bool
    """Data-parallel ranks share weights and gradients, too (FSDP, ZeRO-3); else the optimizer alone (ZeRO-1)."""
    weight_bytes: float
    """Of a parameter of a trained model."""
    gradient_bytes: float
    optimizer_bytes: float
    frozen_bytes: float
    """Of a parameter of a model that is only read."""
    compute_bytes: float
    """Of a number in matrix products, activations and the KV cache."""
    rereads_kv: bool
    """The generator reads the KV cache of a group once for every query head (vLLM 0.3), not once for all."""
    running_sequences: int
    """Most sequences that one generator decodes at once."""
    may_offload: bool
    """Whether states may wait in host memory."""
    efficiency: Efficiency


@dataclass(frozen=True)
class Correction:
    """Measured over predicted seconds, by kind; 1 where nothing was measured."""

    factors: dict[Kind, float] = field(default_factory=dict)

    def of(self, kind: Kind) -> float:
        """The factor of a kind."""
        return self.factors.get(kind, 1.0)


_EFFICIENCY = Efficiency(
    kernel=0.82,
    memory=0.76,
    link=0.95,
    network=0.97,
    decode_seconds=7e-3,
    sequence_seconds=1.6e-4,
    update_seconds=0.02,
    call_seconds=0.16,
    transition_seconds=2.7,
)

_ON_CPU = Efficiency(
    kernel=0.5,
    memory=0.7,
    link=0.5,
    network=0.5,
    decode_seconds=3e-3,
    sequence_seconds=5e-5,
    update_seconds=0.02,
    call_seconds=0.02,
    transition_seconds=0.05,
)

TRAINER = Software(
    shards_weights=True,
    weight_bytes=4,
    gradient_bytes=4,
    optimizer_bytes=8,  # Adam's two moments
    frozen_bytes=4,
    compute_bytes=2,
    rereads_kv=False,
    running_sequences=256,
    may_offload=True,
    efficiency=_EFFICIENCY,
)


def software_for(device: Device, precision: Literal["Auto", "FP32", "BF16"]) -> Software:
    """This project's trainer on a device; Auto is FP32 on CPU and BF16 on GPU."""
    full = precision == "FP32" or (precision == "Auto" and device == "CPU")
    return replace(
        TRAINER,
        compute_bytes=4 if full else 2,
        may_offload=device == "GPU",
        efficiency=_ON_CPU if device == "CPU" else _EFFICIENCY,
    )
