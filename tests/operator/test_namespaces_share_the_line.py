"""Namespaces share the line: within one priority the one that holds the fewest slots per weight is next."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlhf_operator.settings import Queue, Settings
from tests.operator.shared_cluster import SharedCluster
from tests.operator.test_small_jobs_begin_before_their_turn import job, nodes_of


class Teams(SharedCluster):
    """A cluster with room for four jobs; `red` has taken it, and goes on to submit more than others."""

    def __init__(self, jobs: Sequence[str], **weights: float) -> None:
        super().__init__(nodes_of(4))
        self.settings = Settings(queue=Queue(namespace_weights=weights))
        self.start_operator()
        for number in range(4):
            self.submit(f"first-{number}", job(1), "red")
            self.settle()
        for number, team in enumerate(jobs):
            self.submit(f"{team}-{number}", job(1), team)
            self.settle()

    def order(self) -> list[str]:
        """The teams of the jobs that begin as others end, the oldest first."""
        while running := [name for name in self.begun if (self.home(name)) in self.objects["rayjobs"]]:
            self.end(running[0])
            self.settle()
        return [name.split("-")[0] for name in self.begun[4:]]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({}, ["blue", "blue", "red", "red", "blue", "red", "red", "red", "red"]),
        ({"red": 1000.0}, ["blue", "red", "red", "red", "blue", "red", "red", "red", "blue"]),
        ({"blue": 3.0}, ["blue", "blue", "blue", "red", "red", "red", "red", "red", "red"]),
    ],
    ids=["equal", "red counts more", "blue counts more"],
)
def test_a_team_with_many_jobs_does_not_hold_all(weights: dict[str, float], expected: list[str]) -> None:
    assert Teams(["red"] * 6 + ["blue"] * 3, **weights).order() == expected


def test_the_first_in_line_is_named_with_its_namespace() -> None:
    cluster = Teams(["red", "blue"])
    told = {name: cluster.condition(name, "QuotaReserved").message for name in ("red-0", "blue-1")}
    assert told["blue-1"].startswith("1st in line; no node has room for ")
    cluster.wait(61)
    again = cluster.condition("red-0", "QuotaReserved").message
    assert again.startswith("2nd in line behind blue/blue-1; no node has room for ")
    assert again.rpartition("; ")[2].startswith("expected to begin by 2026-01-31 12:")


def test_a_foreseen_start_changes_no_status_every_minute() -> None:
    cluster = Teams(["red", "blue"])
    cluster.wait(61)
    before = cluster.version
    cluster.wait(300)
    assert cluster.version == before
