"""What steps took corrects predictions, and shows that another placement is better."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhf_api.job import Job
from rlhf_api.status import Attempt, MappedPlacement, Measured, MeasuredPhase, Pace, PhaseSeconds
from rlhf_mapper.hardware import GPUS, Cluster, NodeGroup
from rlhf_operator import conditions
from rlhf_operator.placement.ask_mapper import Past
from rlhf_operator.placement.map_job import better, map_job
from rlhf_operator.placement.review import measure_pace, predicted
from rlhf_operator.snapshot import ObservedNode, Snapshot
from tests.operator.fake_trainer import TOTAL_STEPS
from tests.operator.rendered import A100, SETTINGS, changed, example_jobs, nodes, snapshot
from tests.operator.simulated import SFT, World

PPO = "helpful-ppo"
GROWS: dict[str, Any] = {
    **SFT,
    "training": {"totalSteps": TOTAL_STEPS, "batchSize": 8},
    "resources": {"device": "CPU", "nodes": 2, "maxNodes": 8, "slotsPerNode": 1},
}


def fleet(count: int) -> tuple[ObservedNode, ...]:
    return nodes(count, prefix="node-")


def pace(seconds: float) -> Pace:
    return Pace(step_seconds=seconds, phases=(PhaseSeconds(phase="update", seconds=seconds),))


def mapping(world: World) -> MappedPlacement:
    assert world.status.mapping
    return world.status.mapping


def measured(world: World, attempt: int = 1) -> Measured:
    found = world.status.attempts[attempt - 1].measured
    assert found
    return found


def mapped(world: World) -> tuple[str, str]:
    """Reason and message of the condition."""
    found = conditions.found(world.status.conditions, "Mapped")
    return (found.reason, found.message) if found else ("", "")


def named(world: World) -> int:
    """Events that name a better placement."""
    return sum(event.reason == "BetterPlacement" for event in world.events)


def trained(seconds: float = 2.0, **fields: Any) -> World:
    """A job on two nodes at step 12, of which each took so long."""
    given: dict[str, Any] = {"nodes": fleet(2), "pace": pace(seconds)} | fields
    world = World(**given)
    world.run_to(12)
    return world


def outgrown(remap: str) -> World:
    """A job on two nodes at step 12, and two more have come before its steps were measured."""
    world = World(spec={**GROWS, "placement": {"remap": remap}}, nodes=fleet(2))
    world.run_to(3)
    assert mapping(world).slots == 2
    world.nodes, world.pace = fleet(4), pace(2.0)
    world.train(9)
    world.settle()
    return world


def go_on(world: World, steps: int) -> None:
    """The next attempt makes steps, from the last checkpoint on."""
    world.settle()
    world.make_pods()
    world.start_pods()
    world.settle()
    world.train(steps)
    world.settle()


def test_mapping_and_attempt_show_predicted_and_measured() -> None:
    world = trained(2.0)
    (phase,) = measured(world).phases
    assert (phase.phase, phase.seconds, measured(world).step) == ("update", 2.0, 12)
    assert phase.predicted_seconds == pytest.approx(mapping(world).predicted_step_seconds)
    world.pace = pace(3.0)
    world.train(1)
    world.settle()
    assert mapping(world).measured_step_seconds == 3.0
    assert measured(world).step_seconds == 2.0, "once an attempt"


def test_the_next_attempt_is_predicted_as_the_last_measured() -> None:
    world = trained(2.0)
    assert mapping(world).predicted_step_seconds != pytest.approx(2.0)
    world.edit(suspend=True)
    for _ in range(3):
        world.settle()
        world.collect()
    world.edit(suspend=False)
    world.settle()
    assert mapping(world).predicted_step_seconds == pytest.approx(2.0)
    assert mapping(world).measured_step_seconds is None
    assert "a step is predicted to take 2 s (1 to 4), corrected by measured steps" in mapped(world)[1]
    go_on(world, 3)
    assert measured(world, 2).phases == measured(world, 1).phases, "predictions beside it are not corrected"


def test_a_job_is_corrected_only_by_one_with_its_models() -> None:
    (attempt,) = trained(2.0).status.attempts
    alone = World(nodes=fleet(2))
    same, other = (World(nodes=fleet(2), others=(each,)) for each in (attempt, _with(attempt, models="others")))
    for world in (alone, same, other):
        world.settle()
    assert mapping(same).predicted_step_seconds == pytest.approx(2.0)
    assert mapping(other).predicted_step_seconds == mapping(alone).predicted_step_seconds


def _with(attempt: Attempt, **changes: object) -> Attempt:
    assert attempt.measured
    return attempt.model_copy(update={"measured": attempt.measured.model_copy(update=changes)})


def test_the_newest_attempt_on_such_gpus_corrects() -> None:
    def took(seconds: float, gpu: str) -> Measured:
        phases = (MeasuredPhase(phase="update", seconds=seconds, predicted_seconds=1.0),)
        return Measured(step=9, step_seconds=seconds, gpus=(gpu,), phases=phases)

    past = Past(measured=(took(2, "h100-80g"), took(3, "a100-80g"), took(4, "h100-80g")))
    factors = {gpu: past.correction(cluster(gpu)).of("update") for gpu in ("h100-80g", "a100-80g", "l40s-48g")}
    assert factors == {"h100-80g": 4.0, "a100-80g": 3.0, "l40s-48g": 4.0}
    assert Past(measured=(took(1e6, "h100-80g"),)).correction(cluster("h100-80g")).of("update") == 1.0


def cluster(gpu: str) -> Cluster:
    return Cluster((NodeGroup(gpu=GPUS[gpu], count=1, gpus_per_node=8),))


def after(seen: Snapshot, took: Measured) -> Snapshot:
    """The same after an attempt that measured this."""
    attempt = Attempt(attempt=1, start_time="2026-01-31T12:00:00Z", slots=2, measured=took)
    status = seen.job.status.model_copy(update={"attempts": (attempt,)})
    return replace(seen, job=replace(seen.job, status=status))


def test_responses_are_as_long_as_in_the_last_attempt() -> None:
    job, seen = example_jobs()[PPO], snapshot(example_jobs()[PPO], nodes(1))
    answers = []
    for tokens in (None, 10.0, 1e6):
        took = Measured(step=9, step_seconds=1.0, response_tokens=tokens)
        answer = map_job(job, after(seen, took), SETTINGS).mapping
        assert answer
        answers.append(answer.predicted_step_seconds or 0.0)
    unknown, short, too_long = answers
    assert short < unknown < too_long, "half of the limit is assumed"


def slowed(job: Job, have: MappedPlacement, seen: Snapshot, phase: str) -> tuple[Snapshot, float]:
    """After an attempt in which a phase took a hundred times as long as predicted; and the seconds of its steps."""
    as_predicted = predicted(job, have, seen, SETTINGS, Past())
    assert as_predicted
    assert as_predicted.prediction
    seconds = {each: took * (100 if each == phase else 1) for each, took in as_predicted.prediction.phases.items()}
    phases = tuple(PhaseSeconds(phase=each, seconds=took) for each, took in seconds.items())
    told = Pace(step_seconds=sum(seconds.values()), phases=phases)
    return after(seen, measure_pace(job, have, told, 9, seen, SETTINGS)), told.step_seconds


def test_the_slowest_phases_show_the_better_placement() -> None:
    job = changed(PPO, {"resources.nodes": 4, "resources.slotsPerNode": 1, "resources.device": "CPU"})
    seen = snapshot(job, nodes(4))
    first = map_job(job, seen, SETTINGS).mapping
    assert first
    have = map_job(job, slowed(job, first, seen, "scoring")[0], SETTINGS).mapping
    assert have
    assert len(have.pools) > 1, "where scoring is slow, models score at the same time"
    known, seconds = slowed(job, have, seen, "generation")
    again = predicted(job, have, known, SETTINGS)
    assert again
    assert again.prediction
    assert again.prediction.step_seconds == pytest.approx(seconds, rel=1e-3)
    assert better(job, have, known, SETTINGS).startswith("pool all: 4 CPU slots"), "where it is slow, all generate"


def test_a_better_placement_is_named_and_not_taken_unasked() -> None:
    world = outgrown("Never")
    reason, message = mapped(world)
    assert reason == "BetterPlacement"
    assert "pool all: 4 CPU slots" in message
    assert message.endswith("suspend the job and resume it to take it.")
    world.train(20)
    world.settle()
    assert (named(world), world.made, mapping(world).slots) == (1, ["job-a1"], 2)


def test_a_better_placement_waits_for_the_next_checkpoint() -> None:
    world = outgrown("AtCheckpoint")
    assert mapped(world)[1].endswith("it is taken at the next checkpoint.")
    assert world.status.checkpoint
    assert world.status.checkpoint.step == 10
    assert world.phase == "Running"
    world.train(8)
    world.settle()
    assert world.phase == "Restarting"
    world.collect()
    world.settle()
    assert (world.made, mapping(world).slots, mapped(world)[0]) == (["job-a1", "job-a2"], 4, "Mapped")
    assert [each.outcome for each in world.status.attempts] == ["Remapped", "Running"]
    assert world.status.failed_attempts == 0


def test_a_job_changes_its_placement_so_only_once() -> None:
    world = outgrown("AtCheckpoint")
    world.train(8)
    world.settle()
    world.collect()
    go_on(world, 2)
    assert (measured(world, 2).step, mapped(world)[0]) == (22, "Mapped")
    world.nodes = fleet(8)
    world.end(5)
    world.ray_tells()
    world.settle()
    world.start_again()
    go_on(world, 3)
    assert (measured(world, 3).step, mapped(world)[0], mapping(world).slots) == (23, "BetterPlacement", 4)
    world.train(10)
    world.settle()
    assert (len(world.made), named(world)) == (3, 2)


def test_a_better_placement_that_is_gone_is_no_longer_named() -> None:
    world = outgrown("Never")
    world.nodes = fleet(2)
    world.end(5)
    world.ray_tells()
    world.settle()
    world.start_again()
    assert mapped(world)[0] == "BetterPlacement"
    go_on(world, 3)
    assert mapped(world)[0] == "Mapped"


def test_a_placement_by_hand_is_measured_and_stays() -> None:
    pools = [{"name": "all", "models": ["actor"], "nodes": 1, "slotsPerNode": 1}]
    spec = {**SFT, "resources": {"device": "CPU"}, "placement": {"mode": "Manual", "pools": pools}}
    world = trained(spec=spec, nodes=fleet(4))
    assert measured(world).phases
    assert (mapped(world)[0], named(world)) == ("ManualPlacement", 0)


def test_without_a_prediction_the_pace_alone_is_noted() -> None:
    resources = {**SFT["resources"], "device": "GPU"}
    world = trained(spec={**SFT, "resources": resources}, nodes=nodes(2, 1, "unknown", "node-"))
    assert mapped(world)[0] == "ShapesUnknown"
    assert (measured(world).step_seconds, measured(world).phases) == (2.0, ())
    assert mapping(world).measured_step_seconds == 2.0


def test_nodes_that_a_mapping_does_not_use_need_no_figures() -> None:
    job, mine = changed(PPO, {"resources.device": "GPU"}), nodes(1, 8, A100)
    have = map_job(job, snapshot(job, mine), SETTINGS).mapping
    assert have
    seen = snapshot(job, (*mine, *nodes(1, 8, "unknown", "other")))
    told = measure_pace(job, have, pace(2.0), 9, seen, SETTINGS)
    assert ([each.phase for each in told.phases], told.gpus) == (["update"], ("a100-80g",))


def test_a_fault_of_the_mapper_does_not_stop_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of the test")

    world = trained(spec=GROWS, pace=None)
    monkeypatch.setattr("rlhf_operator.placement.ask_mapper.predict", fail)
    monkeypatch.setattr("rlhf_operator.placement.ask_mapper.plan_job", fail)
    world.pace = pace(2.0)
    world.train(1)
    world.settle()
    assert (world.phase, measured(world).phases, named(world)) == ("Running", (), 0)


@pytest.mark.parametrize("seconds", [0.001, 1.0, 1000.0])
def test_the_steps_speed_alone_recommends_no_placement(seconds: float) -> None:
    world = trained(seconds, spec=GROWS)
    assert (mapped(world)[0], named(world)) == ("Mapped", 0)
