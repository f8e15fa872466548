"""The trainer's coefficients against public speeds of software like it (tests/mapper/oracles/public.py)."""

from __future__ import annotations

from statistics import mean

import pytest

from rlhf_api.job import Job
from rlhf_mapper.auto_map import auto_map
from rlhf_mapper.coefficients import TRAINER
from rlhf_mapper.mapping import DeviceMapping
from rlhf_mapper.workload import Lengths, lognormal
from tests.mapper.oracles import public, testbed
from tests.mapper.planned_jobs import cluster_of, job_of, shapes_of

MOST_OFF = 0.4
PEAK = 989.4e12
OF_PEAK = 0.34, 0.5
FORWARDS = 3.5
"""Of a training step, in FLOPs: forward, twice as many backward, and every second layer once more."""


def test_long_uneven_responses_are_within_forty_percent() -> None:
    off = [abs(public.step_seconds(step, TRAINER.efficiency) / step.seconds - 1) for step in public.STEPS.values()]
    assert mean(off) <= MOST_OFF
    assert max(off) <= MOST_OFF + 0.1


@pytest.mark.parametrize("name", public.DECODED)
def test_a_decode_step_takes_about_as_long(name: str) -> None:
    *_, seconds = public.DECODED[name]
    assert public.decoded_seconds(name, TRAINER.efficiency) == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize("name", public.TRAINED)
def test_training_is_as_fast_as_it_is_honest(name: str) -> None:
    shape, _, tokens, _, speed = public.TRAINED[name]
    seconds, model = public.trained_seconds(name, TRAINER.efficiency), public.SHAPES[shape]
    assert seconds == pytest.approx(1 / speed, rel=0.3)
    attention = 2 * tokens * model.heads * model.head_size * model.layers
    flops = 2 * (model.layers * model.active_layer_parameters + model.head_parameters) + attention
    assert OF_PEAK[0] <= FORWARDS * flops / seconds / PEAK <= OF_PEAK[1]


def test_a_prediction_says_coefficients_and_lengths() -> None:
    job = job_of("PPO", data={"maxResponseTokens": 1000})

    def predicted(given: Job, *responses: float) -> tuple[str, float]:
        found = auto_map(given, cluster_of(("h100-80g", 2, 8)), shapes_of(given), device="GPU", responses=responses)
        assert isinstance(found, DeviceMapping)
        assert found.prediction
        return found.prediction.coefficients, found.prediction.response_tokens

    name, mean = predicted(job)
    assert (name, round(mean, -1)) == (TRAINER.name, 500), "without a history half of the limit"
    assert predicted(job, 100, 300) == (TRAINER.name, 200)
    assert testbed.SOFTWARE.name != TRAINER.name


def test_a_lognormal_has_its_mean_and_its_99th_of_100() -> None:
    lengths = Lengths(lognormal(1000, 4000, most=100_000))
    assert lengths.mean == pytest.approx(1000, rel=0.02)
    assert sum(each > 4000 for each in lengths.sample) == pytest.approx(4, abs=1), "of 400"
    assert Lengths(lognormal(1000, 4000, most=3000)).longest == 3000


@pytest.mark.parametrize(("mean_", "p99"), [(1000, 1000), (1000, 900), (100, 1600), (0, 10)])
def test_no_lognormal_has_such_a_mean(mean_: float, p99: float) -> None:
    with pytest.raises(ValueError, match="99 of 100"):
        lognormal(mean_, p99, most=1e6)
