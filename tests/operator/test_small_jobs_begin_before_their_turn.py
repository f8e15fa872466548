"""Backfill on a simulated cluster: a job begins before its turn where it delays none ahead, and else gives its room.

Server, KubeRay, scheduler and trainers are played; a trainer runs up to three times as long as predicted. A node has
room for one worker pod; head pods have a node of their own.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest

from rlhf_api.status import Attempt, Status
from rlhf_operator.reconcile import forecast, giving, line
from rlhf_operator.times import timestamp
from tests.each import each_case
from tests.operator.fake_trainer import START
from tests.operator.shared_cluster import SMALL, Document, SharedCluster, node, spec

WORKERS, HEADS = {"for": "workers"}, {"for": "heads"}
"""Labels of nodes for worker pods and for head pods."""
NODES = 8
WORKER_CPUS = 4
PATIENT = {"startupDeadlineSeconds": 10**6}
"""Policy of a job whose trainer never says a word."""
CHECKPOINT_SECONDS = 60.0
"""A played trainer saves at once; the operator looks at the first in line once a minute."""


def job(workers: int, steps: int = 100, **fields: Any) -> dict[str, Any]:
    made = spec(workers, WORKER_CPUS, WORKERS, runPolicy=PATIENT, **fields)
    made["runtime"]["controller"] = {**SMALL, "template": {"spec": {"nodeSelector": HEADS}}}
    return {**made, "training": {**made["training"], "totalSteps": steps, "batchSize": 24}}


def nodes_of(workers: int) -> list[Document]:
    many = [node(f"node-{number}", WORKER_CPUS, {}, **WORKERS) for number in range(workers)]
    return [*many, node("heads", 100, {}, **HEADS)]


def cluster_of(nodes: int, seed: int = 0) -> SharedCluster:
    return SharedCluster(nodes_of(nodes), seed)


def outcomes(cluster: SharedCluster, name: str) -> list[str]:
    return [each.outcome for each in cluster.status(name).attempts]


def begun(cluster: SharedCluster, *names: str) -> list[bool]:
    return [bool(cluster.status(name).reserved) for name in names]


def told(cluster: SharedCluster, name: str) -> str:
    return cluster.condition(name, "QuotaReserved").message


def test_a_short_job_begins_behind_a_large_one_that_waits() -> None:
    cluster = cluster_of(4)
    cluster.submit("runs", job(2, steps=10_000))
    cluster.settle()
    for name, wanted in (("large", job(4)), ("short", job(1, steps=50)), ("long", job(1, steps=50_000))):
        cluster.submit(name, wanted)
        cluster.settle()
    assert begun(cluster, "large", "short", "long") == [False, True, False]
    assert cluster.status("short").attempts[-1].backfilled
    assert not cluster.status("runs").attempts[-1].backfilled
    assert told(cluster, "long").startswith("2nd in line behind team/large; the free room is kept for that job; ")


@pytest.mark.parametrize(("margin", "begins"), [(0.9, False), (1.1, True)])
def test_a_guest_ends_some_minutes_before_the_first_begins(margin: float, begins: bool) -> None:
    def seconds_of_step(of: SharedCluster, name: str) -> float:
        mapping = of.status(name).mapping
        assert mapping
        assert mapping.predicted_step_seconds
        return mapping.predicted_step_seconds

    alone, cluster = cluster_of(1), cluster_of(4)
    alone.submit("short", job(1))
    alone.settle()
    for name, wanted in (("runs", job(3, steps=10_000)), ("large", job(4))):
        cluster.submit(name, wanted)
        cluster.settle()
    ends = 10_000 * seconds_of_step(cluster, "runs") - margin * giving.START_AND_END_SECONDS
    cluster.submit("short", job(1, steps=int(ends / seconds_of_step(alone, "short"))))
    cluster.settle()
    assert begun(cluster, "large", "short") == [False, begins]


def test_a_job_of_any_length_takes_room_the_first_cannot_use() -> None:
    cluster = cluster_of(4)
    cluster.submit("runs", job(2, steps=1000))
    cluster.settle()
    for name, wanted in (("large", job(3)), ("long", job(1, steps=50_000)), ("longer", job(1, steps=50_000))):
        cluster.submit(name, wanted)
        cluster.settle()
    assert begun(cluster, "large", "long", "longer") == [False, True, False], "the first needs three of four nodes"


def test_who_outlasts_its_prediction_gives_its_room_back() -> None:
    cluster = cluster_of(4)
    cluster.submit("runs", job(3, steps=10_000))
    cluster.settle()
    for name, wanted in (("large", job(4)), ("short", job(1, steps=50))):
        cluster.submit(name, wanted)
        cluster.settle()
    assert begun(cluster, "large", "short") == [False, True]
    cluster.wait(600)
    assert begun(cluster, "large", "short") == [False, True], "the first could not use its room"
    cluster.end("runs-a1")
    cluster.settle()
    assert begun(cluster, "large", "short") == [True, False]
    assert outcomes(cluster, "short") == ["Yielded"]
    assert cluster.status("short").failed_attempts == 0
    assert cluster.status("short").attempts[-1].message == (
        "Attempt 1 had begun before its turn and gives its room to team/large."
    )
    assert told(cluster, "short").startswith("1st in line; no node has room for ")
    cluster.end("large-a1")
    cluster.settle()
    cluster.end("short-a2")
    cluster.settle()
    assert outcomes(cluster, "short") == ["Yielded", "Succeeded"]


def test_only_the_guests_whose_room_is_needed_give_it_back() -> None:
    cluster = cluster_of(4)
    cluster.submit("runs", job(2, steps=10_000))
    cluster.settle()
    cluster.submit("large", job(3))
    cluster.settle()
    for name in ("early", "late"):
        cluster.submit(name, job(1, steps=50))
        cluster.settle()
        cluster.now += timedelta(seconds=5)
    assert begun(cluster, "large", "early", "late") == [False, True, True]
    cluster.end("runs-a1")
    cluster.settle()
    assert begun(cluster, "large", "early", "late") == [True, True, False]
    assert outcomes(cluster, "early") == ["Running"]


@pytest.mark.parametrize("times", [2, 3])
def test_who_gave_its_room_back_often_waits_for_its_turn(times: int) -> None:
    cluster = cluster_of(2)
    for name, wanted in (("runs", job(1, steps=10_000)), ("large", job(2))):
        cluster.submit(name, wanted)
        cluster.settle()
    cluster.submit("short", job(1, steps=50))
    now = timestamp(cluster.now)
    ended = [
        Attempt(attempt=number + 1, start_time=now, end_time=now, slots=1, outcome="Yielded") for number in range(times)
    ]
    cluster.write(cluster.home("short"), Status(attempt=times, attempts=tuple(ended)))
    cluster.settle()
    assert begun(cluster, "short") == [times < 3]


@each_case(
    ("seconds", "words"),
    [
        (100, "expected to begin by 2026-01-31 12:15 UTC"),
        (3 * 3600, "expected to begin by 2026-01-31 15:00 UTC"),
        (20 * 3600, "expected to begin by 2026-02-01 12:00 UTC"),
        (1e15, "nobody can say when it begins"),
        (math.inf, "nobody can say when it begins"),
    ],
)
def test_a_start_is_told_the_rougher_the_farther_it_is(seconds: float, words: str) -> None:
    assert forecast.start_in_words(seconds, START) == words


@dataclass
class History:
    """History of jobs that came at random: the delay of each start, and how much of the cluster was in use."""

    cluster: SharedCluster
    dice: random.Random
    workers: dict[str, int] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)
    """Seconds that each trainer has still to run; what it has done is saved."""
    since: dict[str, datetime] = field(default_factory=dict)
    """Moments at which the running attempts began to train."""
    could: dict[str, datetime] = field(default_factory=dict)
    """Moments at which waiting jobs could have begun if no later job ran."""
    delays: list[float] = field(default_factory=list)
    busy: float = 0.0
    last: datetime = START
    """End of the last trainer."""

    def submit(self, name: str) -> None:
        dice = self.dice
        self.workers[name] = dice.choice([1, 1, 1, 2, 3, NODES])
        steps = dice.randrange(20, 300)
        self.cluster.submit(name, job(self.workers[name], steps))
        self.cluster.settle()
        mapping = self.cluster.status(name).mapping
        assert mapping
        assert mapping.predicted_step_seconds
        self.left[name] = steps * mapping.predicted_step_seconds * dice.uniform(0.3, 3.0)
        self.look()

    def go_on(self, until: datetime) -> None:
        """Time passes; trainers that have done their work end."""
        while self.since:
            end, name = min((self.end_of(name), name) for name in self.since)
            if end > until:
                break
            self.pass_time(end)
            if self.end_of(name) <= self.cluster.now:
                self.cluster.end(self.attempt(name))
                self.last = self.cluster.now
                del self.left[name], self.since[name]
                self.cluster.settle()
                self.look()
        self.pass_time(until)

    def end_of(self, name: str) -> datetime:
        latest = datetime.max.replace(tzinfo=self.cluster.now.tzinfo)
        return self.since[name] + timedelta(seconds=self.left[name]) if name in self.since else latest

    def attempt(self, name: str) -> str:
        return f"{name}-a{self.cluster.status(name).attempt}"

    def pass_time(self, until: datetime) -> None:
        seconds = max((until - self.cluster.now).total_seconds(), 0.0)
        self.busy += seconds * sum(self.workers[name] for name in self.since)
        self.cluster.wait(seconds)
        self.look()

    def look(self) -> None:
        """Note who has begun, who has given its room back, and who could begin."""
        now = self.cluster.now
        for name in self.left:
            holds = bool(self.cluster.status(name).reserved)
            if holds and name not in self.since:
                self.since[name] = now
                self.delays.append((now - self.could.pop(name, now)).total_seconds())
            elif not holds and name in self.since:
                self.left[name] -= (now - self.since.pop(name)).total_seconds()
        waiting = [name for name in self.left if name not in self.since]
        if waiting:  # in the order in which they came
            older = sum(self.workers[name] for name in self.since if name < waiting[0])
            if self.workers[waiting[0]] + older <= NODES:
                self.could.setdefault(waiting[0], now)


def run(count: int, seed: int) -> History:
    history = History(cluster_of(NODES, seed), random.Random(seed))
    for number in range(count):
        history.submit(f"job-{number:04}")
        pause = timedelta(seconds=history.dice.expovariate(1 / 100))
        history.go_on(history.cluster.now + pause)
    while history.left:
        history.go_on(history.cluster.now + timedelta(hours=1))
    return history


@pytest.mark.parametrize(
    ("count", "seed"), [(8, 0), *(pytest.param(100, seed, marks=pytest.mark.slow) for seed in range(10))]
)
def test_the_first_in_line_is_not_delayed(
    count: int, seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(line, "RECHECK_SECONDS", 900.0)  # an event wakes whoever may begin
    monkeypatch.setattr(giving, "START_AND_END_SECONDS", 0.0)  # played pods start and end at once
    found = {}
    for depth in (line.BACKFILL_DEPTH, 0):
        monkeypatch.setattr(line, "BACKFILL_DEPTH", depth)
        history = run(count, seed)
        ends = Counter(end for name in history.workers for end in outcomes(history.cluster, name))
        assert (ends["Succeeded"], ends["Failed"]) == (count, 0)
        assert max(history.delays) <= CHECKPOINT_SECONDS, "the first in line begins when it could without the others"
        seconds = (history.last - START).total_seconds()
        found[depth] = (history.busy / NODES / seconds, ends["Yielded"])
    (with_it, yielded), (without, none) = found.values()
    with capsys.disabled():
        sys.stdout.write(
            f"\n{count} jobs (simulated): {with_it:.0%} of the nodes in use, {without:.0%} without backfill"
        )
        sys.stdout.write(f"; {yielded} attempts gave their room back\n")
    assert none == 0
