"""What may change between two runs into one folder, and what makes the second another experiment."""

from pathlib import Path
from typing import Any

import pytest

from rlhf_api.checks.resume import changes, identity
from rlhf_api.files import document_of, load
from tests.each import each_case

MANIFEST = Path(__file__).parents[2] / "examples" / "01-helpful-ppo.yaml"


def resolved(name: str, *overrides: str) -> dict[str, Any]:
    """A job of the example as it is saved, after `--set`."""
    job = next(job for job in load(MANIFEST, [f"{name}:{override}" for override in overrides]) if job.name == name)
    document: dict[str, Any] = document_of(job)
    return document


@each_case(
    "override",
    [
        "resources.slotsPerNode=1",
        "placement.mode=Manual",
        "checkpoint.everySteps=3",
        "checkpoint.storage=s3://bucket/runs",
        "training.microBatchTokens=64",
        "rollout.gpuMemoryUtilization=0.5",
        "rollout.stream=true",
        "rollout.weightSync=Delta",
        "evaluation.everySteps=2",
        "outputs.tensorboard=true",
        "models.actor.gradientCheckpointing=true",
        "models.actor.offload=All",
        "models.actor.parallelism.tensor=2",
        "training.totalSteps=99",
    ],
)
def test_where_and_when_may_change(override: str) -> None:
    overrides = [override]
    if "Manual" in override:
        overrides.append("placement.pools=[{name: a, models: [actor, critic, reference, reward], slotsPerNode: 1}]")
    if override.startswith(("rollout.stream", "rollout.weightSync")):
        overrides.append("rollout.endpoints=['http://a:8000']")
    assert changes(resolved("helpful-ppo"), resolved("helpful-ppo", *overrides)) == []


@each_case(
    "override",
    [
        "training.seed=1",
        "models.actor.optimizer.learningRate=1.0",
        "data.train.limit=7",
        "algorithm.kl.coefficient=0.9",
        "rollout.temperature=0.5",
        "models.critic.uri=job://helpful-sft",
    ],
)
def test_what_changes_the_numbers_is_named(override: str) -> None:
    (problem,) = changes(resolved("helpful-ppo"), resolved("helpful-ppo", override))
    assert problem.path == f"spec.{override.partition('=')[0]}"
    assert "--restart" in problem.message


CODE = "entrypoint: a:b, arguments: {timeoutSeconds: %s}, timeoutSeconds: %s"
PLACES = {
    "a function": "models.reward={%s}",
    "a part of a sum": "models.reward={sum: [{name: a, reward: {%s}}]}",
    "an evaluation function": "evaluation.functions=[{name: a, %s}]",
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_the_patience_with_code_may_change_not_its_arguments(place: str) -> None:
    before, patient, other = (
        resolved("helpful-ppo", place % (CODE % numbers)) for numbers in ((1, 10), (1, 20), (2, 10))
    )
    assert changes(before, patient) == []
    assert identity(before, {}) == identity(patient, {})
    (problem,) = changes(before, other)
    assert problem.path.endswith(".arguments.timeoutSeconds")
    assert identity(before, {}) != identity(other, {})


def test_a_sum_with_another_part_is_another_experiment() -> None:
    part = "{name: %s, reward: {entrypoint: a:b}}"
    one, two = (
        resolved("helpful-ppo", f"models.reward={{sum: [{parts}]}}")
        for parts in (part % "a", f"{part % 'a'}, {part % 'b'}")
    )
    (problem,) = changes(one, two)
    assert problem.path == "spec.models.reward.sum"


def test_a_teacher_may_move_to_another_server() -> None:
    before, moved, other = (resolved("helpful-ppo") for _ in range(3))
    for job, change in ((before, {}), (moved, {"url": "http://b/v1"}), (other, {"model": "n"})):
        job["spec"]["models"]["teacherEndpoints"] = [{"name": "t", "url": "http://a/v1", "model": "m"} | change]
    assert changes(before, moved) == []
    (problem,) = changes(before, other)
    assert problem.path == "spec.models.teacherEndpoints.0.model"


def test_the_length_may_not_change_under_its_schedule() -> None:
    (problem,) = changes(resolved("helpful-sft"), resolved("helpful-sft", "training.totalSteps=99"))
    assert problem.path == "spec.training.totalSteps"
    assert "a schedule depends on it" in problem.message


def test_what_a_job_makes_is_named_by_experiment_and_inputs() -> None:
    made = identity(resolved("helpful-rm"), {"helpful-sft": "one"})
    assert made == identity(resolved("helpful-rm", "checkpoint.everySteps=3"), {"helpful-sft": "one"})
    assert made != identity(resolved("helpful-rm", "training.seed=1"), {"helpful-sft": "one"})
    assert made != identity(resolved("helpful-rm"), {"helpful-sft": "two"})
