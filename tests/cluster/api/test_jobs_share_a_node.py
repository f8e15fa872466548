"""More jobs than a node has room for: each has its turn, with all of its pods or none, and none loses an attempt."""

from collections.abc import Iterator

import pytest

from tests.cluster.client import Cluster
from tests.cluster.conftest import fresh_namespace
from tests.cluster.shared import JOBS, ROOM, pairs, turns, two_places
from tests.cluster.stage import Lives, stage


@pytest.fixture(scope="module")
def lives(rlhf_server: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    for namespace in fresh_namespace(rlhf_server):
        folder = tmp_path_factory.mktemp("operator")
        with two_places(rlhf_server), stage(rlhf_server, namespace, folder) as (lives, process):
            yield lives
            assert "Traceback" not in process.log()


def test_twelve_jobs_with_room_for_two_finish_in_order(lives: Lives) -> None:
    assert turns(lives) == {"outcomes": [["Succeeded"]] * JOBS, "in_order": True, "most_at_once": ROOM}


def test_waiting_jobs_hold_nothing_and_priority_is_next(
    lives: Lives,
) -> None:
    found = pairs(lives)
    assert found["outcomes"] == [["Succeeded"]] * 3
    assert (found["reason"], found["pods_meanwhile"]) == ("WaitingForRoom", 0)
    assert found["told"].startswith("1st in line; no node has room for 2 of 2 pods of pool")
