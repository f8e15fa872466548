"""What the conditions and events of a job say where it waits, and when its attempt has ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_api.status import Status
from rlhf_operator import conditions, names
from rlhf_operator.reconcile.decide import decide
from rlhf_operator.snapshot import ObservedClaim, ObservedRayJob, Refusal
from tests.each import each_case
from tests.operator.fake_trainer import START
from tests.operator.rendered import nodes
from tests.operator.running_jobs import NODES
from tests.operator.simulated import SFT, World
from tests.operator.test_a_job_lives_its_life import PPO_LIKE, first, message, reason


def test_a_queue_that_nobody_manages_is_told_as_such() -> None:
    world = World(labels={names.QUEUE: "team"}, has_kueue=False)
    world.settle()
    assert (world.phase, world.made) == ("Provisioning", ["job-a1"])
    assert reason(world, "QuotaReserved") == "QueueIgnored"


def test_without_kueue_nobody_waits_for_a_queues_label() -> None:
    world = World(labels={names.QUEUE: "team"}, has_kueue=False, nodes=nodes(1, 8))
    world.operate()
    assert world.status.attempt == 1
    assert "waits to be admitted" not in message(world, "QuotaReserved")


def test_kueue_is_believed_by_its_deeds_without_workloads() -> None:
    world = World(labels={names.QUEUE: "team"})
    world.operate()
    world.quota = None
    world.settle()
    assert world.phase == "Queued"
    world.admit()
    world.quota = None
    world.settle()
    assert (world.phase, reason(world, "QuotaReserved")) == ("Provisioning", "QuotaReserved")


@each_case("phase", ["Succeeded", "Failed", "Restarting", "Suspending", "Suspended"])
def test_no_condition_of_an_attempt_outlives_it(phase: str) -> None:
    policy = {"progressDeadlineSeconds": 1000, "backoffLimit": int(phase == "Restarting")}
    world = World(labels={names.QUEUE: "team"}, spec={**SFT, "runPolicy": policy})
    world.settle()
    world.admit()
    world.run_to(49)
    world.wait(600)
    world.settle()
    holding = {each.type for each in world.status.conditions if each.status == "True"}
    assert {"ClusterReady", "Training", "Slow", "QuotaReserved"} <= holding
    if phase == "Succeeded":
        world.train(1)
    if phase.startswith("Suspend"):
        world.edit(suspend=True)
    else:
        world.end(0 if phase == "Succeeded" else 5)
    world.settle()
    if phase == "Suspended":
        world.collect()
        world.collect()
        world.settle()
    assert world.phase == phase
    for kind in ("ClusterReady", "Slow", "QuotaReserved"):
        ended = conditions.found(world.status.conditions, kind)
        assert ended
        assert (ended.type, ended.status, ended.reason) == (kind, "False", "Ended")


def test_what_keeps_a_new_job_is_an_event_and_once_a_reason() -> None:
    world = World(spec={**PPO_LIKE, "checkpoint": {"storage": "pvc://mine"}})

    def events() -> list[tuple[str, str]]:
        for _ in range(3):
            world.operate()
            world.wait(10)
        told: list[tuple[str, str]] = [(each.kind, each.reason) for each in world.events]
        world.events.clear()
        return told

    assert events() == [("Warning", "ClaimMissing")]
    assert world.phase == "Pending"
    world.claims["mine"] = ObservedClaim(name="mine")
    assert events() == [("Warning", "InputMissing")]
    world.inputs["first"] = first()
    assert events() == [("Normal", "InputNotReady")]
    world.claims["first-output"] = ObservedClaim(name="first-output")
    world.inputs["first"] = first(phase="Succeeded", output_uri="pvc://first-output/first/model")
    world.nodes = ()
    assert events() == [("Warning", "NoFeasiblePlacement")]
    assert world.phase == "Mapping"
    world.nodes = None
    world.rayjobs["job-a1"] = ObservedRayJob(
        name="job-a1", uid="x", attempt=1, owned=False, created=START, deleting=False
    )
    assert events() == [("Normal", "Mapped"), ("Warning", "NameConflict")]
    world.rayjobs.clear()
    assert events() == [("Normal", "Provisioning"), ("Warning", "KubeRayAway")]


def test_what_the_server_refused_was_told_when_it_was() -> None:
    world = World(nodes=NODES)
    refused = Refusal(reason="CreateRefused", message="RayJob job-a1 was refused: exceeded quota")
    seen = replace(world.observe(fresh=True), refused=refused, alone=True)
    plan = decide(seen, world.now, world.settings)
    assert decide(replace(seen, refused=None), world.now, world.settings).status.reserved
    assert (plan.status.phase, plan.status.reserved) == ("Pending", ()), "other jobs may begin meanwhile"
    assert "CreateRefused" not in [each.reason for each in plan.events]
    told = next(each.message for each in plan.status.conditions if each.type == "ClusterReady")
    assert (told, plan.status.attempts[-1].outcome) == (
        "RayJob job-a1 is not made: see condition Accepted.",
        "Starting",
    )


def test_checkpoints_in_a_folder_of_a_pod_are_not_accepted() -> None:
    world = World(spec={**SFT, "checkpoint": {"storage": "file:///checkpoints"}})
    world.settle()
    assert (world.phase, reason(world, "Accepted"), world.made) == ("Pending", "InvalidSpec", [])
    assert "spec.checkpoint.storage" in message(world, "Accepted")
    world.edit(checkpoint={"storage": "s3://bucket"})
    world.settle()
    assert world.made == ["job-a1"]


def test_a_job_that_lost_a_field_begins_no_attempt_unless_edited() -> None:
    world = World(lost_fields=("spec.runtime.nodeSelector",))
    world.settle()
    assert (world.phase, reason(world, "Accepted"), world.made) == ("Pending", "SpecChangedByUpgrade", [])
    assert "spec.runtime.nodeSelector" in message(world, "Accepted")
    world.edit(runPolicy={"backoffLimit": 1})
    world.settle()
    assert (reason(world, "Accepted"), world.made) == ("Accepted", ["job-a1"])
    assert "without spec.runtime.nodeSelector" in message(world, "Accepted")


def test_a_job_that_no_operator_has_seen_is_told_what_it_lost() -> None:
    world = World(lost_fields=("spec.runtime.nodeSelector",), status=Status(observed_generation=-1))
    world.settle()
    assert (reason(world, "Accepted"), world.made) == ("SpecChangedByUpgrade", [])


def test_a_job_resumed_after_an_upgrade_is_told_what_it_lost() -> None:
    world = World()
    world.settle()
    world.edit(suspend=True)
    world.settle()
    world.lost_fields = ("spec.runtime.tolerations",)
    world.edit(suspend=False)
    world.settle()
    assert (reason(world, "Accepted"), world.made) == ("SpecChangedByUpgrade", ["job-a1"])


@pytest.mark.parametrize("is_gone_before", [True, False])
def test_an_edit_is_remembered_beside_another_obstacle(is_gone_before: bool) -> None:
    lost, world = "spec.runtime.nodeSelector", World(lost_fields=("spec.runtime.nodeSelector",))
    world.settle()
    if is_gone_before:
        world.capabilities = frozenset()
        world.settle()
    world.edit(runPolicy={"backoffLimit": 1})
    world.capabilities = frozenset()
    world.settle()
    assert (reason(world, "Accepted"), world.status.accepted_losses) == ("KubeRayMissing", (lost,))
    world.capabilities = frozenset({"kuberay"})
    world.settle()
    assert (reason(world, "Accepted"), world.made) == ("Accepted", ["job-a1"])


def test_a_loss_by_a_later_upgrade_is_told_anew() -> None:
    world = World(lost_fields=("spec.a",), capabilities=frozenset())
    world.settle()
    world.edit(runPolicy={"backoffLimit": 1})
    world.settle()
    world.lost_fields, world.capabilities = ("spec.a", "spec.b"), frozenset({"kuberay"})
    world.settle()
    assert (reason(world, "Accepted"), world.made) == ("SpecChangedByUpgrade", [])
    assert "dropped spec.b;" in message(world, "Accepted")


def test_an_attempt_goes_on_where_a_field_is_lost_meanwhile() -> None:
    world = World()
    world.settle()
    world.admit()
    world.run_to(10)
    world.lost_fields = ("spec.runtime.nodeSelector",)
    world.settle()
    assert world.phase == "Running"
    world.end(1)
    for _ in range(3):
        world.settle()
        world.collect()
        world.wait(300)
    assert (reason(world, "Accepted"), world.made) == ("SpecChangedByUpgrade", ["job-a1"])
