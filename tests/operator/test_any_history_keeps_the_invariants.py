"""Random histories of a simulated cluster: whatever happens in whatever order, the invariants of a job's life hold.

The world itself checks every write and every action (simulated.check_step, World._act); here are the happenings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rlhf_api.status import Pace, PhaseSeconds
from rlhf_operator import names
from rlhf_operator.snapshot import ObservedContainer, ObservedNode, ObservedRayJob
from tests.operator.fake_trainer import START
from tests.operator.invariants import check
from tests.operator.simulated import SFT, World

NODES = tuple(
    ObservedNode(
        name=f"node-{number}", ready=True, schedulable=True, labels={}, allocatable={"cpu": "64", "memory": "512Gi"}
    )
    for number in range(4)
)
POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"backoffLimit": 0},
    {"backoffLimit": 1, "restartBackoffSeconds": 0},
    {"activeDeadlineSeconds": 900, "progressDeadlineSeconds": 300, "startupDeadlineSeconds": 120},
    {
        "ttlSecondsAfterFinished": 60,
        "failureRules": [{"name": "tries-again", "reasons": ["UserCode"], "action": "Ignore"}],
    },
    {"failureRules": [{"name": "elsewhere", "action": "Remap"}], "backoffLimit": 100},
)


class Life(RuleBasedStateMachine):
    """One job from its creation on, with everything that can happen to it."""

    @initialize(
        policy=st.sampled_from(POLICIES), is_queued=st.booleans(), knows_nodes=st.booleans(), may_grow=st.booleans()
    )
    def begin(self, policy: dict[str, object], is_queued: bool, knows_nodes: bool, may_grow: bool) -> None:
        labels = {names.QUEUE: "team"} if is_queued else {}
        nodes = NODES[:1] if may_grow else NODES
        spec: dict[str, Any] = {**SFT, "runPolicy": policy}
        if may_grow:
            resources = {**SFT["resources"], "nodes": 1, "maxNodes": 4}
            spec |= {"placement": {"remap": "AtCheckpoint"}, "resources": resources}
        self.world = World(spec=spec, labels=labels, nodes=nodes if knows_nodes else None)

    @rule(dies_after=st.sampled_from([None, None, None, -1, 0, 1, 2]))
    def the_operator_passes(self, dies_after: int | None) -> None:
        self.world.operate(dies_after=dies_after)

    @rule()
    def all_goes_well_for_a_while(self) -> None:
        self.world.operate()
        self.world.admit()
        self.world.make_pods()
        self.world.start_pods()
        self.world.train(3)
        self.world.operate()

    @rule()
    def the_operator_restarts(self) -> None:
        self.world.restart_operator()

    @rule()
    def the_cache_falls_behind(self) -> None:
        self.world.observe(fresh=False)
        self.world.is_lagging = True

    @rule()
    def the_cache_catches_up(self) -> None:
        self.world.is_lagging = self.world.is_quota_lagging = False

    @rule(seconds=st.sampled_from([1, 15, 40, 130, 400, 2000, 5000, -3600]))
    def time_passes(self, seconds: int) -> None:
        self.world.wait(seconds)

    @rule()
    def kuberay_makes_pods(self) -> None:
        self.world.make_pods()

    @rule()
    def kubelets_start_pods(self) -> None:
        self.world.start_pods()

    @rule()
    def the_garbage_is_collected(self) -> None:
        self.world.collect()

    @rule()
    def kueue_admits(self) -> None:
        self.world.admit()

    @rule(is_seen_late=st.booleans())
    def kueue_preempts(self, is_seen_late: bool) -> None:
        if is_seen_late:
            self.world.observe(fresh=False)
            self.world.is_quota_lagging = True
        self.world.take_quota()

    @rule()
    def kueue_preempts_and_admits_again(self) -> None:
        self.world.take_quota()
        self.world.operate()
        self.world.take_down()
        self.world.admit()
        self.world.make_pods()
        self.world.operate()

    @rule(seconds=st.sampled_from([0.0, 1.0, 1.0, 1e9]))
    def nodes_come_and_steps_are_measured(self, seconds: float) -> None:
        if self.world.nodes is not None:
            self.world.nodes = NODES
        self.world.pace = Pace(step_seconds=seconds, phases=(PhaseSeconds(phase="update", seconds=seconds),))
        self.world.train(3)
        self.world.operate()

    @rule(steps=st.integers(0, 30))
    def the_trainer_trains(self, steps: int) -> None:
        self.world.train(steps)

    @rule(exit_code=st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 127, 137, 143]), is_told=st.booleans())
    def the_trainer_ends(self, exit_code: int, is_told: bool) -> None:
        trainer = self.world.trainer
        if exit_code == 0 and (trainer is None or trainer.phase != "Succeeded"):
            return
        self.world.end(exit_code)
        if is_told:
            self.world.ray_tells()

    @rule()
    def ray_tells_the_end(self) -> None:
        self.world.ray_tells()

    @precondition(lambda self: self.world.pods)
    @rule(
        data=st.data(),
        how=st.sampled_from(["deleted", "gone", "evicted", "preempted", "oom", "failed", "pull", "unfit"]),
    )
    def a_pod_has_trouble(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.pods)))
        now, pod = self.world.now, self.world.pods[name]
        own = names.HEAD_CONTAINER if pod.role == names.CONTROLLER else names.WORKER_CONTAINER
        match how:
            case "gone":
                del self.world.pods[name]
            case "deleted":
                self.world.change(name, deleting_since=now, ready=False, not_ready_since=now)
            case "evicted":
                self.world.change(name, deleting_since=now, disruption="EvictionByEvictionAPI", ready=False)
            case "preempted":
                self.world.change(name, deleting_since=now, disruption="PreemptionByScheduler", ready=False)
            case "failed":
                self.world.change(name, phase="Failed", ready=False, not_ready_since=now)
            case "oom":
                ended = ObservedContainer(name=own, exit_code=137, ended_reason="OOMKilled")
                self.world.change(name, phase="Failed", ready=False, containers=(ended,))
            case "pull":
                waiting = ObservedContainer(name=own, waiting_reason="ImagePullBackOff")
                self.world.change(name, phase="Pending", ready=False, containers=(waiting,), unschedulable="")
            case "unfit":
                self.world.change(name, phase="Pending", ready=False, unschedulable="0/3 nodes are available")

    @precondition(lambda self: self.world.nodes is not None)
    @rule(number=st.integers(0, 3), how=st.sampled_from(["silent", "gone", "back"]))
    def a_node_has_trouble(self, number: int, how: str) -> None:
        others = tuple(node for node in self.world.nodes or () if node.name != f"node-{number}")
        if how == "back":
            self.world.nodes = (*others, NODES[number])
            return
        mine = [pod.name for pod in self.world.pods.values() if pod.node == f"node-{number}"]
        for pod in mine:
            self.world.change(pod, ready=False, not_ready_since=self.world.now)
        self.world.nodes = others if how == "gone" else (*others, replace(NODES[number], ready=False))

    @rule()
    def the_head_pod_answers_or_not(self) -> None:
        self.world.is_reachable = not self.world.is_reachable

    @rule(suspend=st.booleans())
    def a_user_suspends_or_resumes(self, suspend: bool) -> None:
        self.world.edit(suspend=suspend)

    @rule(spec=st.sampled_from([{"training": {}}, {"training": SFT["training"]}, {"data": 3}, {"data": SFT["data"]}]))
    def a_user_edits(self, spec: dict[str, object]) -> None:
        self.world.edit(**spec)

    @rule()
    def a_user_deletes_the_rayjob(self) -> None:
        if rayjob := self.world.live:
            self.world.rayjobs[rayjob.name] = replace(rayjob, deleting=True)

    @rule()
    def a_stranger_takes_the_next_name(self) -> None:
        name = names.rayjob_name("job", (self.world.status.attempt or 0) + 1)
        if name in self.world.rayjobs:
            del self.world.rayjobs[name]
        else:
            foreign = ObservedRayJob(name=name, uid="x", attempt=0, owned=False, created=START, deleting=False)
            self.world.rayjobs[name] = foreign

    @invariant()
    def no_two_attempts_are_alive(self) -> None:
        if not hasattr(self, "world"):
            return
        alive = {pod.attempt for pod in self.world.pods.values()} | {
            int(each.name.rpartition("-a")[2]) for each in self.world.rayjobs.values() if each.owned
        }
        check(len(alive) <= 1, "at most one attempt is alive")

    def teardown(self) -> None:
        """In peace, every job comes to an end, and nothing of it is left running."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.restart_operator()
        world.is_reachable, world.nodes = True, NODES if world.nodes is not None else None
        world.edit(**{**SFT, "suspend": False})
        for name in [each.name for each in world.rayjobs.values() if not each.owned]:
            del world.rayjobs[name]
        for name in world.pods:
            world.change(name, unschedulable="")
        for _ in range(30):
            world.operate()
            world.collect()
            world.admit()
            world.make_pods()
            world.start_pods()
            world.train(50)
            if world.trainer is not None and world.trainer.phase == "Succeeded":
                world.end(0)
                world.ray_tells()
            world.wait(60)
        check(world.is_deleted or world.status.phase in ("Succeeded", "Failed"), f"it ends: {world.status.phase}")
        check(not world.rayjobs and not world.pods, "nothing is left")


def lives(count: int) -> settings:
    return settings(
        max_examples=count, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


def test_any_history_keeps_the_promises() -> None:
    run_state_machine_as_test(Life, settings=lives(25))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_histories_keep_the_invariants() -> None:
    run_state_machine_as_test(Life, settings=lives(3000))
