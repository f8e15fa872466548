"""A cause of trouble that the trainer finds becomes a condition and an event, and may suspend the job."""

from __future__ import annotations

from rlhf_api.exit_codes import ExitCode
from rlhf_operator import conditions
from tests.operator.simulated import World

NAME = "FastLearning"
CAUSE = f"{NAME} at step 10: likely cause of trouble: the learning rate is too high"


def find(world: World) -> None:
    assert world.trainer
    world.trainer.causes = (CAUSE,)
    world.train()
    world.settle()


def test_it_is_a_condition_and_an_event() -> None:
    world = World()
    world.run_to(9)
    assert conditions.found(world.status.conditions, "Healthy") is None
    find(world)
    healthy = conditions.found(world.status.conditions, "Healthy")
    assert healthy
    assert (healthy.status, healthy.reason) == ("False", NAME)
    assert healthy.message == CAUSE
    assert [each.kind for each in world.events if each.reason == NAME] == ["Warning"]
    assert (world.phase, world.status.causes) == ("Running", (CAUSE,))


def test_a_trainer_that_pauses_suspends_its_job() -> None:
    world = World()
    world.run_to(9)
    find(world)
    world.end(ExitCode.PAUSED)
    world.ray_tells()
    world.settle()
    world.collect()
    world.settle()
    suspended = conditions.found(world.status.conditions, "Suspended")
    assert suspended
    assert (world.phase, suspended.reason) == ("Suspended", "PausedByWatch")
    assert CAUSE in suspended.message
    assert not world.status.failed_attempts
    world.wait(100_000)
    world.settle()
    assert world.made == ["job-a1"]
    world.edit(suspend=True)
    world.settle()
    world.edit(suspend=False)  # as kubectl rlhf resume does
    world.run_to(20)
    assert (world.phase, world.made) == ("Running", ["job-a1", "job-a2"])
    assert [each.outcome for each in world.status.attempts] == ["Suspended", "Running"]


def test_a_job_pauses_after_a_step_and_goes_on_to_the_next() -> None:
    """As `kubectl rlhf tune` has it do, by another step in the spec."""
    world = World()
    world.edit(checkpoint={"pauseAfterStep": 10})
    world.run_to(10)
    world.end(ExitCode.PAUSED)
    world.ray_tells()
    for _ in range(2):
        world.settle()
        world.collect()
    world.settle()
    suspended = conditions.found(world.status.conditions, "Suspended")
    assert suspended
    assert (world.phase, world.made) == ("Suspended", ["job-a1"])
    assert suspended.message == "Any change of the spec, or kubectl rlhf resume, has the job go on."
    world.edit(checkpoint={"pauseAfterStep": 20})
    world.run_to(20)
    assert (world.phase, world.made) == ("Running", ["job-a1", "job-a2"])
