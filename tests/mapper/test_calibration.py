"""What a run measured corrects later predictions, kind by kind."""

from pathlib import Path

import numpy as np
import pytest

from rlhf_api.files import load
from rlhf_api.names import Role
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.auto_map import auto_map
from rlhf_mapper.calibration import compare_phases, correction_of
from rlhf_mapper.coefficients import Correction
from rlhf_mapper.hardware import CPU_SLOT, Cluster, NodeGroup
from rlhf_mapper.mapping import PHASES, DeviceMapping, Phase, Prediction, as_json
from tests.each import each_case

JOB = load(Path(__file__).parents[2] / "examples" / "01-helpful-ppo.yaml")[2]
ONE_SLOT = Cluster((NodeGroup(gpu=CPU_SLOT, count=1, gpus_per_node=1),))
SCORERS = ("critic", "reward")


def shape(role: Role) -> Architecture:
    return Architecture(
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_size=16,
        ffn=128,
        vocabulary=512,
        scores=role in SCORERS,
    )


def plan(correction: Correction) -> Prediction:
    """Of the demo's PPO on one slot, where there is one mapping only."""
    mapping = auto_map(JOB, ONE_SLOT, {role: shape(role) for role in JOB.models()}, device="CPU", correction=correction)
    assert isinstance(mapping, DeviceMapping)
    assert mapping.prediction
    return mapping.prediction


def steps(phase: str, *seconds: float) -> list[dict[str, float]]:
    return [{"step": n, f"time/{phase}": measured} for n, measured in enumerate(seconds, 1)]


def test_a_phase_is_compared_by_its_median_step() -> None:
    rows = [{"step": n, "time/update": update, "time/step": 6.0} for n, update in enumerate((2.0, 9.0, 4.0), 1)]
    assert compare_phases({"update": 2.0, "step": 3.0}, rows) == [("update", 2.0, 4.0, 2.0), ("step", 3.0, 6.0, 2.0)]


@pytest.mark.parametrize(
    ("seconds", "median"), [((50.0, 70.0, 3.0, 1.0, 2.0), 2.0), ((50.0, 70.0, 3.0, 1.0), 26.5)], ids=["five", "four"]
)
def test_the_first_two_of_more_than_four_steps_warm_up(seconds: list[float], median: float) -> None:
    (compared,) = compare_phases({"generation": 0.5}, steps("generation", *seconds))
    assert compared.measured == median


def test_a_factor_is_measured_over_predicted_times_the_last() -> None:
    rows = [{"step": 1.0, "time/update": 3.0, "time/generation": 1.0, "time/scoring": 0.5, "time/reshard": 0.2}]
    predicted: dict[Phase, float] = {"update": 2.0, "generation": 4.0, "scoring": 0.5, "reshard": 0.1}
    assert correction_of(predicted, rows).factors == {
        "update": 1.5,
        "generation": 0.25,
        "scoring": 1.0,
        "reshard": 2.0,
    }
    again = correction_of(predicted, rows, before=Correction({"update": 4.0, "reshard": 0.5}))
    assert again.factors == {"update": 6.0, "generation": 0.25, "scoring": 1.0, "reshard": 1.0}


@each_case(
    ("predicted", "measured"),
    [
        ({}, {"time/update": 1.0}),
        ({"update": 1.0}, {}),
        ({"update": 0.0}, {"time/update": 1.0}),
        ({"update": 1.0}, {"time/update": 0.0}),
    ],
    ids=["never predicted", "never measured", "predicted as nothing", "measured as nothing"],
)
def test_what_is_missing_corrects_nothing(predicted: dict[Phase, float], measured: dict[str, float]) -> None:
    assert correction_of(predicted, [{"step": 1.0, **measured}]).factors == {}
    before: dict[Phase, float] = {"update": 3.0}
    assert correction_of(predicted, [{"step": 1.0, **measured}], before=Correction(before)).factors == before
    assert correction_of(predicted, []).factors == {}


@each_case("seed", range(20))
def test_a_plan_with_the_correction_of_a_run_predicts_that_run(seed: int) -> None:
    rng = np.random.default_rng(seed)
    before = Correction({phase: float(10 ** rng.uniform(-2, 2)) for phase in PHASES})
    measured = {phase: float(10 ** rng.uniform(-3, 3)) for phase in PHASES}
    rows = [{f"time/{phase}": seconds for phase, seconds in measured.items()}]
    corrected = plan(correction_of(plan(before).phases, rows, before=before))
    assert corrected.phases == pytest.approx(measured)
    assert corrected.step_seconds == pytest.approx(sum(measured.values()))


def test_a_mapping_carries_the_factors_it_was_made_with() -> None:
    factors: dict[Phase, float] = {"update": 2.0, "generation": 0.5}
    cluster, shapes = ONE_SLOT, {role: shape(role) for role in JOB.models()}
    mapping = auto_map(JOB, cluster, shapes, device="CPU", correction=Correction(factors))
    assert as_json(mapping)["predicted"]["correction"] == factors
