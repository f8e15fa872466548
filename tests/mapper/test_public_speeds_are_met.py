"""The trainer's coefficients against public speeds of software like it (tests/mapper/oracles/public.py)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import numpy as np
import pytest

from rlhf_api.job import Job
from rlhf_mapper.auto_map import auto_map
from rlhf_mapper.coefficients import TRAINER
from rlhf_mapper.mapping import DeviceMapping
from rlhf_mapper.simulate import generation
from rlhf_mapper.simulate.passes import Passes
from rlhf_mapper.workload import Lengths, lognormal
from tests.each import each_case
from tests.mapper.oracles import public, testbed
from tests.mapper.planned_jobs import cluster_of, job_of, shapes_of

MOST_OFF = {"sync": (0.2, 0.45), "async": (0.2, 0.45), "experts": (0.45, 0.45), "decode": (0.12, 0.3)}
"""Mean and largest error by kind; those of passes alone are in the docs."""
SOFTWARE = public.software_of(TRAINER.efficiency)


def errors_of(points: Sequence[public.Point]) -> dict[str, float]:
    return {point.name: abs(point.predict(SOFTWARE) / point.seconds - 1) for point in points}


@each_case("kind", MOST_OFF)
def test_steps_and_decoding_take_about_as_long(kind: str) -> None:
    points = [*public.step_points(), *public.phase_points()]
    off = errors_of([point for point in points if point.kind == kind])
    usual, most = MOST_OFF[kind]
    assert mean(off.values()) <= usual
    assert max(off.values()) <= most, off


def test_most_published_steps_lie_in_their_interval() -> None:
    inside = []
    for point in public.usable_steps():
        mapping = public.mapped_step(point, SOFTWARE)
        assert mapping is not None
        assert mapping.prediction is not None
        inside.append(mapping.prediction.low <= point["step_seconds"] <= mapping.prediction.high)
    assert mean(inside) >= 0.8


def test_our_own_updates_take_about_as_long() -> None:
    off = errors_of([each for each in public.phase_points() if each.source in ("ours", "torchtitan")])
    updates = [error for name, error in off.items() if "vllm" not in name]
    assert mean(updates) <= 0.2


@pytest.mark.parametrize(("most_gpus", "shards"), [(1, 1), (8, 8)])
def test_a_larger_generator_is_faster_for_one_sequence(most_gpus: int, shards: int) -> None:
    """An all-reduce of a decode step takes 5 us, so eight GPUs beat one as measured, and do not lose as once said."""
    model = public.shape_of(public.POINTS["points"][0])
    passes = Passes(model, public.nodes_of("H100", 8), SOFTWARE)
    seconds = {
        t: float(generation.decode_step(passes, public.alone(1, t, 1), np.array(1.0), 1024))
        for t in (1, 2, 4, 8)
        if t <= most_gpus
    }
    assert min(seconds, key=seconds.__getitem__) == shards


def test_a_prediction_says_coefficients_and_lengths() -> None:
    job = job_of("PPO", data={"maxResponseTokens": 1000})

    def predicted(given: Job, *responses: float) -> tuple[str, float]:
        found = auto_map(given, cluster_of(("h100-80g", 2, 8)), shapes_of(given), device="GPU", responses=responses)
        assert isinstance(found, DeviceMapping)
        assert found.prediction
        return found.prediction.coefficients, found.prediction.response_tokens

    name, mean = predicted(job)
    assert name == f"{TRAINER.name}, fused layers, kernels as measured on h100-80g"
    assert round(mean, -1) == 500, "without a history half of the limit"
    assert predicted(job, 100, 300) == (name, 200)
    assert testbed.SOFTWARE.name != TRAINER.name


def test_a_lognormal_has_its_mean_and_its_99th_of_100() -> None:
    lengths = Lengths(lognormal(1000, 4000, most=100_000))
    assert lengths.mean == pytest.approx(1000, rel=0.02)
    assert sum(each > 4000 for each in lengths.sample) == pytest.approx(4, abs=1), "of 400"
    assert Lengths(lognormal(1000, 4000, most=3000)).longest == 3000


@each_case(("mean_", "p99"), [(1000, 1000), (1000, 900), (100, 1600), (0, 10)])
def test_no_lognormal_has_such_a_mean(mean_: float, p99: float) -> None:
    with pytest.raises(ValueError, match="99 of 100"):
        lognormal(mean_, p99, most=1e6)
