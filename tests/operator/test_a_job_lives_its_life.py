"""Phases, conditions and actions of a job that has no trouble of its own, on a simulated cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhf_operator import conditions, names
from rlhf_operator.actions import Create, Delete, ReadLive, SetOwner
from rlhf_operator.cluster import parse
from rlhf_operator.reconcile.decide import decide
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import ObservedClaim, ObservedJob, ObservedRayJob, Refusal
from tests.each import each_case
from tests.operator.fake_trainer import DIGEST, START
from tests.operator.invariants import result
from tests.operator.simulated import SFT, World

PPO_LIKE: dict[str, Any] = {**SFT, "algorithm": {"name": "RewardModel"}, "models": {"reward": {"uri": "job://first"}}}


def reason(world: World, kind: Any) -> str:
    found = conditions.found(world.status.conditions, kind)
    return found.reason if found else ""


def message(world: World, kind: Any) -> str:
    found = conditions.found(world.status.conditions, kind)
    return found.message if found else ""


def test_the_phases_follow_each_other() -> None:
    world = World()
    assert world.phase == "Pending"
    world.operate()
    assert world.phase == "Provisioning"
    world.make_pods()
    world.settle()
    assert world.phase == "Provisioning"
    world.start_pods()
    world.settle()
    assert world.phase == "Initializing"
    world.train(1)
    world.settle()
    assert world.phase == "Running"
    world.train(49)
    world.end(0)
    world.ray_tells()
    world.settle()
    assert world.phase == "Succeeded"
    assert [each.reason for each in world.events if each.reason in ("Provisioning", "Initializing", "Running")] == [
        "Provisioning",
        "Initializing",
        "Running",
    ]


def test_a_job_that_need_not_wait_takes_two_writes() -> None:
    world = World()
    world.settle()
    assert (world.writes, world.made) == (2, ["job-a1"])
    assert world.status.ray_job_name == "job-a1"


def test_a_live_read_comes_before_an_attempt() -> None:
    world = World()
    seen = world.observe(fresh=False)
    plan = decide(seen, world.now, world.settings)
    assert [type(each) for each in plan.actions] == [ReadLive]
    assert plan.status == seen.job.status


def test_success_is_written_before_the_rayjob_is_deleted() -> None:
    world = World()
    world.run_to(50)
    world.end(0)
    world.ray_tells()
    plan = decide(world.observe(fresh=True), world.now, world.settings)
    assert plan.status.phase == "Succeeded"
    assert [isinstance(each, Delete) and each.kind for each in plan.actions] == ["RayJob"]
    assert plan.status.output
    assert (plan.status.output.uri, plan.status.output.digest) == ("pvc://job-output/job/model", DIGEST)
    assert plan.status.progress
    assert plan.status.progress.step == 50
    assert [link.name for link in plan.status.links] == ["actor/product"]


def test_inputs_have_the_specs_addresses() -> None:
    world = World()
    world.run_to(1)
    model, data = world.status.inputs
    assert (model.name, model.uri, model.digest) == ("models.actor", SFT["models"]["actor"]["uri"], DIGEST)
    assert (data.name, data.uri, data.digest) == ("data.train", SFT["data"]["train"]["uri"], None)


def test_success_waits_a_little_for_the_last_words() -> None:
    world = World()
    world.run_to(49)
    world.is_reachable = False
    world.train(1)
    world.end(0)
    world.ray_tells()
    world.settle()
    assert world.phase == "Running"
    world.wait(29)
    world.settle()
    assert world.phase == "Running"
    world.wait(2)
    world.settle()
    assert (world.phase, world.status.progress.step if world.status.progress else 0) == ("Succeeded", 49)


def test_progress_is_written_only_when_it_changes() -> None:
    world = World()
    world.run_to(5)
    writes = world.writes
    for _ in range(3):
        world.wait(15)
        world.operate()
    assert world.writes == writes
    world.train(1)
    world.operate()
    assert world.writes == writes + 1


def test_neither_a_step_nor_a_checkpoint_is_an_event() -> None:
    world = World()
    world.run_to(9)
    events = len(world.events)
    world.train(1)
    world.settle()
    world.train(5)
    world.settle()
    assert len(world.events) == events
    assert world.status.checkpoint
    assert world.status.checkpoint.uri == "pvc://job-output/job/checkpoints/10"


def test_the_status_names_the_image_of_the_pods_and_its_secrets() -> None:
    world = World(settings=Settings(trainer_image="r.example/t:1", image_pull_secrets=("registry",)))
    world.run_to(1)
    assert (world.status.image, world.status.image_pull_secrets) == ("r.example/t:1", ("registry",))


def test_a_job_with_a_queue_waits_for_its_quota() -> None:
    world = World(labels={names.QUEUE: "team"})
    world.settle()
    assert (world.phase, world.status.queue) == ("Queued", "team")
    world.wait(100_000)
    world.settle()
    assert world.phase == "Queued", "a queue has no deadline"
    world.admit()
    world.make_pods()
    world.settle()
    assert world.phase == "Provisioning"
    assert reason(world, "QuotaReserved") == "QuotaReserved"


def test_a_spec_that_cannot_be_read_waits_for_another_one() -> None:
    world = World(spec={**SFT, "training": {"totalSteps": 5, "batchSize": "many"}})
    world.settle()
    assert (world.phase, reason(world, "Accepted")) == ("Pending", "InvalidSpec")
    assert "spec.training.batchSize" in message(world, "Accepted")
    world.edit(training=SFT["training"])
    world.settle()
    assert world.phase == "Provisioning"
    assert world.status.observed_generation == 2


def test_without_kuberay_a_job_waits() -> None:
    world = World(capabilities=frozenset())
    world.settle()
    assert (world.phase, reason(world, "Accepted")) == ("Pending", "KubeRayMissing")
    world.capabilities = frozenset({"kuberay"})
    world.settle()
    assert world.made == ["job-a1"]


def test_a_rayjob_of_somebody_else_is_left_alone() -> None:
    foreign = ObservedRayJob(name="job-a1", uid="x", attempt=1, owned=False, created=START, deleting=False)
    world = World(rayjobs={"job-a1": foreign})
    world.settle()
    assert (world.phase, reason(world, "Accepted")) == ("Pending", "NameConflict")
    assert world.rayjobs == {"job-a1": foreign}
    world.rayjobs.clear()
    world.settle()
    assert world.made == ["job-a1"]


def test_a_foreign_rayjob_is_looked_for_again() -> None:
    foreign = ObservedRayJob(name="job-a1", uid="x", attempt=0, owned=False, created=START, deleting=False)
    world = World(rayjobs={"job-a1": foreign})
    world.settle()
    assert decide(world.observe(fresh=True), world.now, world.settings).requeue_after is not None


def test_what_the_server_refuses_is_told_and_tried_again() -> None:
    world = World()
    refused = Refusal(reason="CreateRefused", message="RayJob job-a1 was refused: exceeded quota")
    world.operate(dies_after=0)
    plan = decide(replace(world.observe(fresh=True), refused=refused), world.now, world.settings)
    world.status = plan.status
    assert (world.phase, reason(world, "Accepted")) == ("Pending", "CreateRefused")
    assert "exceeded quota" in message(world, "Accepted")
    assert any(isinstance(each, Create) for each in plan.actions)
    again = decide(replace(world.observe(fresh=True), refused=refused), world.now, world.settings)
    assert again.status == plan.status
    world.settle()
    assert (world.phase, reason(world, "Accepted")) == ("Provisioning", "Accepted")
    assert world.made == ["job-a1"]


def test_a_claim_that_the_spec_names_is_waited_for() -> None:
    world = World(spec={**SFT, "checkpoint": {"storage": "pvc://mine"}})
    world.settle()
    assert (world.phase, reason(world, "Accepted")) == ("Pending", "ClaimMissing")
    assert "mine" in message(world, "Accepted")
    world.claims["mine"] = ObservedClaim(name="mine")
    world.settle()
    assert world.made == ["job-a1"]


def test_the_output_claim_of_somebody_else_is_not_used() -> None:
    world = World(claims={"job-output": ObservedClaim(name="job-output", owned=False)})
    world.settle()
    assert (world.phase, reason(world, "Accepted")) == ("Pending", "NameConflict")


def test_the_claim_of_an_earlier_job_of_the_name_is_gone_on_in() -> None:
    world = World(claims={"job-output": ObservedClaim(name="job-output", kept_for="job")})
    world.settle()
    assert (world.made, world.claims["job-output"].owned) == (["job-a1"], False)
    other = World(claims={"job-output": ObservedClaim(name="job-output", kept_for="another")})
    other.settle()
    assert (other.made, reason(other, "Accepted")) == ([], "NameConflict")


def test_a_claim_of_an_earlier_namesake_is_not_deleted() -> None:
    left = ObservedClaim(name="job-output", kept_for="job", maker="of an earlier job")
    world = World(spec={**SFT, "storage": {"retain": "Never"}}, claims={"job-output": left})
    world.run_to(3)
    assert (world.made, world.claims["job-output"]) == (["job-a1"], left)
    world.claims["job-output"] = replace(left, owned=True, kept_for="")
    world.settle()
    assert world.claims["job-output"] == left, "if a job was made its owner, it is so no longer"


@pytest.mark.parametrize(
    ("retain", "at_first", "in_the_end"),
    [("Always", False, False), ("OnFailure", False, True), ("Never", True, True)],
)
def test_the_claim_is_deleted_with_the_job_as_the_spec_says(retain: str, at_first: bool, in_the_end: bool) -> None:
    world = World(spec={**SFT, "storage": {"retain": retain}})
    world.run_to(3)
    assert world.claims["job-output"].owned is at_first
    world.train(47)
    world.end(0)
    world.ray_tells()
    world.settle()
    assert (world.phase, world.claims["job-output"].owned) == ("Succeeded", in_the_end)


def test_what_is_kept_may_change_between_end_and_deletion() -> None:
    world = World(spec={**SFT, "storage": {"retain": "OnFailure"}, "runPolicy": {"backoffLimit": 0}})
    world.run_to(3)
    world.end(1)
    world.ray_tells()
    world.settle()
    assert (world.phase, world.claims["job-output"].owned) == ("Failed", False)
    world.edit(storage={"retain": "Never"}, runPolicy={"ttlSecondsAfterFinished": 0})
    world.collect()
    plan = world.operate()
    assert plan is not None
    assert plan.actions == (SetOwner(claim="job-output", owned=True),), "then only the job may go"
    assert plan.requeue_after is not None
    world.settle()
    assert (world.is_deleted, world.claims["job-output"].owned) == (True, True)


def test_too_few_nodes_are_waited_for() -> None:
    world = World(nodes=())
    world.settle()
    assert (world.phase, reason(world, "Mapped")) == ("Mapping", "NoFeasiblePlacement")
    plan = decide(world.observe(fresh=True), world.now, world.settings)
    assert plan.requeue_after is not None


FIRST: dict[str, Any] = {**PPO_LIKE, "models": {"reward": SFT["models"]["actor"]}}


def first(
    phase: str = "Running", output_uri: str = "", spec: dict[str, Any] = FIRST, algorithm: str = "RewardModel"
) -> ObservedJob:
    status = {"phase": phase, "output": {"uri": output_uri} if output_uri else None}
    spec = {**spec, "algorithm": {"name": algorithm}}
    return parse.job({"metadata": {"name": "first"}, "spec": spec, "status": status})


@each_case(
    ("seen", "phase", "expected"),
    [
        (None, "Pending", "InputMissing"),
        (first(), "Pending", "InputNotReady"),
        (first(phase="Suspended"), "Pending", "InputNotReady"),
        (first(phase="Succeeded"), "Pending", "InputNotReady"),
        (first(phase="Succeeded", output_uri="pvc://first-output/first/model"), "Provisioning", "InputsReady"),
        (first(phase="Succeeded", output_uri="pvc://gone/first/model"), "Pending", "ClaimMissing"),
    ],
)
def test_an_input_is_waited_for(seen: ObservedJob | None, phase: str, expected: str) -> None:
    world = World(spec=PPO_LIKE, inputs={"first": seen} if seen else {})
    world.claims["first-output"] = ObservedClaim(name="first-output")
    world.settle()
    assert (world.phase, reason(world, "InputsReady")) == (phase, expected)


@pytest.mark.parametrize(
    ("seen", "expected", "told"),
    [
        (first(phase="Failed"), "InputFailed", "first, which this job reads, failed"),
        (first(algorithm="PPO"), "InvalidInput", "is a job of PPO"),
        (first(spec={"models": {"reward": {"uri": "job://job"}}}), "InvalidInput", "job -> first -> job"),
    ],
)
def test_an_input_that_can_never_do_fails_the_job(seen: ObservedJob, expected: str, told: str) -> None:
    world = World(spec=PPO_LIKE, inputs={"first": seen})
    world.settle()
    assert (world.phase, reason(world, "Failed")) == ("Failed", expected)
    assert told in message(world, "Failed")
    assert not world.made


def test_a_longer_circle_is_found_where_its_jobs_are_known() -> None:
    second = first(spec={"models": {"reward": {"uri": "job://job"}}})
    inputs = {"first": first(spec={"models": {"reward": {"uri": "job://second"}}}), "second": second}
    world = World(spec=PPO_LIKE, inputs=inputs)
    world.settle()
    assert message(world, "Failed").startswith("spec: jobs wait for each other: job -> first -> second -> job")


def test_a_job_that_reads_itself_fails() -> None:
    world = World(spec={**PPO_LIKE, "models": {"reward": {"uri": "job://job"}}})
    world.settle()
    assert (world.phase, reason(world, "Failed")) == ("Failed", "InvalidInput")


def test_suspension_saves_frees_and_goes_on_as_another_attempt() -> None:
    world = World()
    world.run_to(12)
    world.edit(suspend=True)
    world.settle()
    assert (world.phase, world.live) == ("Suspending", None)
    world.restart_operator()
    world.save_and_end(13)
    world.settle()
    assert (world.status.progress and world.status.progress.step, world.status.attempts[-1].last_step) == (13, 13)
    assert world.status.checkpoint
    assert world.status.checkpoint.step == 13
    world.collect()
    world.collect()
    world.settle()
    assert world.phase == "Suspended"
    world.wait(100_000)
    world.edit(suspend=False)
    world.run_to(20)
    assert (world.phase, world.made) == ("Running", ["job-a1", "job-a2"])
    assert [each.outcome for each in world.status.attempts] == ["Suspended", "Running"]
    assert (world.status.failed_attempts, world.status.attempts[1].first_step) == (0, 13)


def test_a_job_that_is_suspended_from_the_start_makes_nothing() -> None:
    world = World(spec={**SFT, "suspend": True})
    world.settle()
    assert (world.phase, world.made, world.claims) == ("Suspended", [], {})


def test_a_finished_job_stays_as_it_is_whatever_the_spec() -> None:
    world = World()
    world.run_to(50)
    world.end(0)
    world.settle()
    ended = world.status
    world.edit(suspend=True, training={"totalSteps": 99, "batchSize": 4})
    world.collect()
    world.wait(10**6)
    world.settle()
    assert result(world.status) == result(ended)
    assert (world.made, world.rayjobs, world.is_deleted) == (["job-a1"], {}, False)


def test_a_job_is_deleted_when_its_time_to_live_is_over() -> None:
    world = World(spec={**SFT, "runPolicy": {"ttlSecondsAfterFinished": 60}})
    world.run_to(50)
    world.end(0)
    world.settle()
    world.collect()
    world.settle()
    plan = world.operate()
    assert plan is not None
    assert plan.requeue_after == pytest.approx(60)
    world.wait(61)
    world.settle()
    assert world.is_deleted


def test_a_deleted_job_is_left_to_the_garbage_collector() -> None:
    world = World()
    seen = world.observe(fresh=True)
    plan = decide(replace(seen, job=replace(seen.job, deleting=True)), world.now, world.settings)
    assert (plan.status, plan.actions, plan.events) == (seen.job.status, (), ())


@each_case("done", [-1, 0, 1, 2, 3])
def test_an_operator_that_dies_while_it_begins_does_no_harm(done: int) -> None:
    world = World()
    world.operate(dies_after=done)
    world.restart_operator()
    world.wait(500)
    world.run_to(3)
    assert (world.phase, world.made, world.status.attempt) == ("Running", ["job-a1"], 1)


def test_a_status_that_was_lost_is_found_again_by_the_rayjob() -> None:
    world = World()
    world.run_to(3)
    world.end(5)
    world.settle()
    world.start_again()
    world.run_to(4)
    world.status = type(world.status)()
    world.settle()
    assert (world.status.attempt, world.phase, world.made) == (2, "Running", ["job-a1", "job-a2"])


def test_manifests_come_from_the_attempt_in_the_status() -> None:
    world = World()
    plan = decide(world.observe(fresh=True), world.now, world.settings)
    assert plan.status.attempt == 1
    assert plan.status.attempts[-1].outcome == "Starting"
    kinds = [each.manifest["kind"] for each in plan.actions if isinstance(each, Create)]
    assert kinds == ["PersistentVolumeClaim", "ConfigMap", "RayJob"]
