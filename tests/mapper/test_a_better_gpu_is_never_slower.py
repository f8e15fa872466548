"""More memory, more FLOP/s or a faster memory never make a predicted step slower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_mapper import auto_map, kernels
from rlhf_mapper.hardware import GPUS, Cluster
from rlhf_mapper.pools import Simulated
from rlhf_mapper.simulate import memory, passes
from tests.mapper.planned_jobs import drawn
from tests.mapper.test_plans_keep_their_promises import TOLERANCE, seconds_of


def on_four_gpus(seed: int, **factors: float) -> float:
    """Seconds of a drawn job on one node of four GPUs whose figures are multiplied by factors."""
    job, cluster, shapes = drawn(seed)
    nodes = replace(cluster.groups[0], count=1, gpus_per_node=4)
    gpu = replace(nodes.gpu, **{name: factor * getattr(nodes.gpu, name) for name, factor in factors.items()})
    return seconds_of(job, Cluster((replace(nodes, gpu=gpu),)), shapes)


SOME, ALL = 4, 500
BLOCKS = [range(SOME), pytest.param(range(SOME, ALL), marks=pytest.mark.slow)]


@pytest.mark.parametrize("seeds", BLOCKS, ids=["some", "all"])
@pytest.mark.parametrize("figures", [("memory",), ("bf16", "fp32"), ("memory_bandwidth",)], ids=lambda names: names[0])
def test_a_better_gpu_is_never_slower(figures: tuple[str, ...], seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two things are left out that may slow a better GPU.

    By a rule of the trainer a larger one keeps whole gradients, with less left for activations (seed 435). And shares
    of the roofline are those of the measured GPU that is most similar, which may be another one (seed 13).
    """
    monkeypatch.setattr(auto_map, "_simulated", lambda _: Simulated())  # what other tests simulated has other figures
    monkeypatch.setattr(memory, "WHOLE_GRADIENTS", 0.0)
    nearest = kernels.nearest
    for module in (kernels, passes):
        monkeypatch.setattr(module, "nearest", lambda gpu: nearest(GPUS[gpu.name]))
    for seed in seeds:
        factor = (1.1, 1.25, 2.0)[seed % 3]
        before, after = on_four_gpus(seed), on_four_gpus(seed, **dict.fromkeys(figures, factor))
        assert after <= before * (1 + TOLERANCE), seed
