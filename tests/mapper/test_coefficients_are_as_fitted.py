"""The coefficients of the simulators: figures that were fitted or measured, which only a new fit may change.

The first eight of a GPU in software.yaml are what `benchmarks/fit.py ours` finds; docs/mapper-reference.md explains
the others, and those of a CPU slot.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest

from rlhf_mapper.coefficients import software_for
from rlhf_mapper.mapping import Device

EFFICIENCY: dict[Device, dict[str, float]] = {
    "GPU": {
        "kernel": 0.84,
        "scoring": 0.83,
        "prefill": 1.02,
        "balance": 0.53,
        "rollout": 0.62,
        "memory": 0.85,
        "link": 0.8,
        "network": 0.85,
        "decode_seconds": 1.8e-4,
        "sequence_seconds": 3.3e-5,
        "update_seconds": 0.02,
        "call_seconds": 0.05,
        "stage_seconds": 1e-3,
        "transition_seconds": 0.25,
    },
    "CPU": {
        "kernel": 0.5,
        "scoring": 0.5,
        "prefill": 0.5,
        "balance": 1.0,
        "rollout": 1.0,
        "memory": 0.7,
        "link": 0.5,
        "network": 0.5,
        "decode_seconds": 3e-3,
        "sequence_seconds": 5e-5,
        "update_seconds": 0.02,
        "call_seconds": 0.02,
        "stage_seconds": 1e-3,
        "transition_seconds": 0.05,
    },
}
BYTES = {"weight_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8}
"""A master weight, its gradient and Adam's two moments are FP32 on both."""


@pytest.mark.parametrize("device", EFFICIENCY)
def test_shares_and_seconds_are_as_fitted(device: Device) -> None:
    assert asdict(software_for(device, "Auto").efficiency) == EFFICIENCY[device]


@pytest.mark.parametrize(
    ("device", "others"),
    [
        ("GPU", {"compute_bytes": 2, "frozen_bytes": 2, "running_sequences": 1024, "state_share": 1.0}),
        ("CPU", {"compute_bytes": 4, "frozen_bytes": 4, "running_sequences": 256, "state_share": 1.0}),
    ],
)
def test_bytes_and_limits_are_those_of_the_engines(device: Device, others: dict[str, float]) -> None:
    found = asdict(software_for(device, "Auto"))
    assert {name: found[name] for name in (*BYTES, *others)} == BYTES | others
