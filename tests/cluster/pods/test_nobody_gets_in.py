"""A job on real pods is attacked while it trains: from another namespace, and from a pod that wears its label."""

import pytest

from tests.cluster import attack, chart
from tests.cluster.attack import ELSEWHERE, WITHIN, Answers
from tests.cluster.client import Cluster


@pytest.fixture(scope="module")
def heard(pods_cluster: Cluster) -> dict[str, Answers]:
    """What the intruders were told."""
    chart.install(pods_cluster)
    return attack.attacked(pods_cluster)


def test_no_door_is_open(heard: dict[str, Answers]) -> None:
    assert attack.open_doors(heard) == []


def test_the_network_of_the_job_is_closed_to_other_pods(heard: dict[str, Answers]) -> None:
    assert heard[ELSEWHERE].pop("secrets") == "403"
    assert all("refused" in said for said in heard[ELSEWHERE].values()), heard


@pytest.mark.parametrize("door", ["dashboard", "agent"])
def test_ray_asks_a_pod_that_gets_past_it_for_the_token(heard: dict[str, Answers], door: str) -> None:
    assert heard[WITHIN][door].startswith("401")


@pytest.mark.parametrize("door", ["client", "gcs"])
def test_so_do_its_servers_for_drivers_and_workers(heard: dict[str, Answers], door: str) -> None:
    assert heard[WITHIN][door].startswith("UNAUTHENTICATED")
