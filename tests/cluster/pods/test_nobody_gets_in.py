"""A job on real pods is attacked while it trains: at every port of its pods, from pods with and without its label.

Nothing of the network stops a pod with the label: so it is where nobody enforces NetworkPolicies.
"""

import pytest

from tests.cluster import attack, chart, intruder
from tests.cluster.attack import BESIDE, ELSEWHERE, SHARED, WITHIN, Attack
from tests.cluster.client import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REFUSED = ("401", "UNAUTHENTICATED")
OPEN = {
    ("dashboard.py", "200"): "the page of Ray's dashboard without any data, and metrics of the dashboard",
    ("ray::DashboardAgent", "200"): "Ray's metrics of the pod",
    ("ray::SlotProcess", intruder.SILENT): "gloo ignores what no rank sends",
    ("ray::SlotProcess", intruder.STORE): "torch's store of ranks on several machines knows no secret",
    ("rlhf", "200"): "the trainer's metrics",
    ("rlhf_trainer.pods.sidecar", "404"): "/status.json",
}
"""Answers of programs to a pod without a token that no NetworkPolicy stops: none has secrets.

None takes orders but torch's store, in which it can write.
"""


@pytest.fixture(scope="module")
def attacked(pods_cluster: Cluster) -> Attack:
    """Answers to the intruders; the job has trained on after them."""
    chart.install(pods_cluster, SHARED)
    return attack.attacked(pods_cluster)


def test_no_door_is_open(attacked: Attack) -> None:
    assert attack.open_doors(attacked.heard) == []


@pytest.mark.parametrize("who", [BESIDE, ELSEWHERE])
def test_the_network_of_the_job_is_closed_to_other_pods(attacked: Attack, who: str) -> None:
    heard = dict(attacked.heard[who])
    assert heard.pop("secrets") == "403"
    closed = (intruder.CLOSED, "<urlopen error", "UNAVAILABLE", "DEADLINE_EXCEEDED")
    assert [door for door, said in heard.items() if not said.startswith(closed)] == []
    assert len(heard) > len(attacked.programs) > 40


def test_what_answers_without_a_policy_is_known(attacked: Attack) -> None:
    heard = {name: (program, attacked.heard[WITHIN][name]) for name, program in attacked.programs.items()}
    answers = {name: found for name, found in heard.items() if not found[1].startswith((intruder.CLOSED, *REFUSED))}
    assert {name: found for name, found in answers.items() if found not in OPEN} == {}
    assert set(answers.values()) == OPEN.keys()


def test_a_world_of_one_pod_is_closed_without_a_policy(attacked: Attack) -> None:
    assert answers_of_ranks(attacked, "writers") == [
        "UNAUTHENTICATED",
        intruder.SILENT,  # gloo of the group with the other pool
    ]


def test_a_world_of_two_pods_has_its_stores_in_one(attacked: Attack) -> None:
    stores = [answers_of_ranks(attacked, pod).count(intruder.STORE) for pod in ("train-0", "train-1")]
    assert sorted(stores) == [0, 2]  # of its pool, and of both pools


def answers_of_ranks(attacked: Attack, pod: str) -> list[str]:
    """Sorted answers of the ranks' open ports in pods of that name, to an intruder whom no policy stops."""
    slots = [name for name, program in attacked.programs.items() if program == "ray::SlotProcess"]
    heard = [attacked.heard[WITHIN][name] for name in slots if name.startswith(pod)]
    return sorted(said for said in heard if not said.startswith(intruder.CLOSED))


@pytest.mark.parametrize("door", ["dashboard", "agent"])
def test_ray_asks_a_pod_that_gets_past_it_for_the_token(attacked: Attack, door: str) -> None:
    assert attacked.heard[WITHIN][door].startswith("401")


@pytest.mark.parametrize("door", ["client", "gcs"])
def test_so_do_its_servers_for_drivers_and_workers(attacked: Attack, door: str) -> None:
    assert attacked.heard[WITHIN][door].startswith("UNAUTHENTICATED")
