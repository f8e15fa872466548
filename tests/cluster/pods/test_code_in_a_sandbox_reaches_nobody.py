"""Sandboxes on real pods under enforced policies: attacked from inside, used by 64 episodes, and killed."""

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlhf_operator import names
from tests.cluster import golden_path
from tests.cluster.client import Cluster
from tests.cluster.conftest import fresh_namespace
from tests.cluster.escape import OPEN
from tests.cluster.sandboxes import ESCAPE, LISTEN, VICTIM_PORT, Stage, doors, played_addresses, stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MEBIBYTE = 2**20
SANDBOX_USER = 65532
BOMB = "import os\nwhile True:\n try:\n  os.fork()\n except OSError:\n  pass"
Report = dict[str, Any]


@pytest.fixture(scope="module")
def played(pods_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, whose nodes have addresses of a metadata service and of the internet."""
    with played_addresses(pods_cluster):
        yield pods_cluster


@pytest.fixture
def staged(played: Cluster) -> Iterator[Stage]:
    for namespace in fresh_namespace(played):
        with stage(played, namespace) as found:
            yield found


def attacked(staged: Stage, **sandbox: Any) -> tuple[Report, Report]:
    """What the program finds in a sandbox, and what it finds in a pod that no policy is about."""
    staged.make(warm=2, memory="512Mi", **sandbox)
    victim = staged.start("victim", ["python", "-c", LISTEN, "0.0.0.0", str(VICTIM_PORT)])
    other = staged.pods("Running")[0]["status"]["podIP"]
    asked = json.dumps(doors(victim, other))
    ((inside,), _) = staged.run(["python3", "escape.py", asked], {"escape.py": ESCAPE.read_text()})
    assert inside.get("code") == 0, inside
    free = [
        "import escape, json, sys",
        f"print(json.dumps({{n: escape.tried(*d) for n, d in json.loads({asked!r}).items()}}))",
    ]
    program = f"import sys; sys.path.insert(0, {str(ESCAPE.parent)!r})\n" + "\n".join(free)
    outside = staged.cluster.kubectl("exec", "-n", staged.namespace, "victim", "--", "python", "-c", program)
    return json.loads(inside["output"].splitlines()[-1]), {"doors": json.loads(outside)}


def test_an_attack_from_inside_reaches_nothing(staged: Stage) -> None:
    inside, outside = attacked(staged)
    # A sandbox may be used by the worker only, whatever pod asks; all other doors are there for who has no policy.
    assert {name for name, said in outside["doors"].items() if said == OPEN} == inside["doors"].keys() - {"sandbox"}
    assert {name for name, said in inside["doors"].items() if said == OPEN} == set()
    assert (inside["credentials"], inside["taken_over"]) == ([], [])
    assert (inside["user"], inside["core"]) == (65532, 0)
    half, written = 256 * MEBIBYTE, inside["written"]
    assert 0 < written.pop("/tmp") <= half
    assert written.pop("/dev/termination-log") <= half, "the one file on the disk of the node has a limit"
    assert written.pop("/dev/shm") <= 64 * MEBIBYTE
    assert set(written.values()) == {0}, written


def test_a_fork_bomb_ends_with_its_sandbox(staged: Stage) -> None:
    before = len(processes_of(SANDBOX_USER))
    staged.make(warm=2, seconds=15)
    counts = [0]
    is_over = threading.Event()

    def count() -> None:
        while not is_over.wait(0.01):
            counts.append(len(processes_of(SANDBOX_USER)))

    watch = threading.Thread(target=count)
    watch.start()
    found, seconds = staged.run(["python3", "-c", BOMB])
    others, _ = staged.run(["echo", "hello"])
    is_over.set()
    watch.join()
    print(f"a fork bomb had {max(counts)} processes at most, and ended in {seconds:.0f} s: {found}")
    assert 10 < max(counts) < 4096
    assert others[0]["output"] == "hello\n", "the node goes on"
    staged.cluster.until(
        lambda: len(processes_of(SANDBOX_USER)) <= before + 2, 60, "only the programs of two pods are left"
    )


def processes_of(user: int) -> list[Path]:
    """Processes of a user on this machine, in whatever pod."""
    found = []
    for process in golden_path.processes():
        with suppress(OSError):
            found += [process] if process.stat().st_uid == user else []
    return found


def test_with_egress_it_reaches_the_internet_only(staged: Stage) -> None:
    inside, outside = attacked(staged, network="Egress")
    assert outside["doors"]["internet"] == OPEN
    assert {name for name, said in inside["doors"].items() if said == OPEN} == {"internet"}


def test_64_episodes_over_8_warm_pods(staged: Stage) -> None:
    staged.make(warm=8)
    found, seconds = staged.run(["sh", "-c", "ls; touch mine; hostname"], count=64, lanes=8)
    print(f"64 episodes over 8 warm pods took {seconds:.0f} s")
    assert [each for each in found if each.get("code") != 0] == []
    hosts = {each["output"] for each in found}
    assert len(hosts) == 64, "each had a pod of its own, without the files of another"
    assert all("mine" not in host for host in hosts)


def test_a_killed_sandbox_is_the_end_of_one_episode(staged: Stage) -> None:
    staged.make(warm=2)
    killed = threading.Timer(5.0, lambda: golden_path.kill_pod(busy(staged)))
    killed.start()
    found, _ = staged.run(["sh", "-c", "touch busy; sleep 12"], count=4, lanes=2)
    killed.join()
    assert sorted(str(each.get("error", each.get("code"))) for each in found) == ["0", "0", "0", "lost its sandbox"]


def busy(staged: Stage) -> golden_path.Document:
    """A sandbox in which the command runs."""
    for pod in staged.pods("Running"):
        name = pod["metadata"]["name"]
        found = staged.cluster.kubectl("exec", "-n", staged.namespace, name, "--", "sh", "-c", "ls /tmp")
        if "busy" in found:
            return pod
    raise AssertionError("no sandbox is in use")


def test_a_pod_with_too_little_memory_is_lost_and_replaced(staged: Stage) -> None:
    staged.make(warm=1)
    found, _ = staged.run(["python3", "-c", f"x = bytearray({512 * MEBIBYTE}); print(len(x))"])
    assert found[0].get("code") != 0, found
    assert staged.run(["echo", "hello"])[0][0]["output"] == "hello\n"


def test_when_all_fail_again_and_again_others_are_there_soon(staged: Stage) -> None:
    staged.make(warm=4)
    for _ in range(3):  # A Job would now wait for ten minutes.
        for pod in staged.pods("Running"):
            golden_path.kill_pod(pod)
        staged.cluster.until(lambda: len(staged.pods("Running")) < 4, 30, "they have failed")
        staged.wait(4)
    assert staged.run(["echo", "hello"])[0][0]["output"] == "hello\n"


def test_they_go_with_their_rayjob(staged: Stage) -> None:
    staged.make(warm=2)
    rayjob = f"/apis/ray.io/v1/namespaces/{staged.namespace}/rayjobs/{staged.rayjob.name}"
    staged.is_over.set()
    staged.cluster.expect("DELETE", rayjob)
    staged.cluster.until(lambda: not staged.pods(), 60, "no sandbox is left")
    for kind in ("services", "configmaps"):
        left = [
            each["metadata"]["name"] for each in staged.cluster.items(f"/api/v1/namespaces/{staged.namespace}/{kind}")
        ]
        assert names.sandboxes_name(staged.rayjob.name) not in left


def test_the_profile_restricted_admits_them(pods_cluster: Cluster, staged: Stage) -> None:
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    pods_cluster.expect("PATCH", f"/api/v1/namespaces/{staged.namespace}", label)
    staged.make(warm=1)
