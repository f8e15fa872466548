"""The run folder on a claim of the user's is made by the user of the pods; where that fails, a sentence says why."""

import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_operator import names
from rlhf_operator.cluster import parse
from rlhf_operator.resources.storage import MAKE_FOLDER
from rlhf_operator.snapshot import ObservedContainer
from tests.operator.rendered import changed, groups, head, made, nodes, pod_of
from tests.operator.simulated import SFT, World
from tests.operator.test_observed_objects import pod

OTHER = 12_345
"""A user who owns nothing."""
TOLD = "spec.checkpoint.storage: user 1000:1000 may not write to folder runs/job of claim mine"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def pods_of(storage: str | None) -> list[dict[str, Any]]:
    """Pods of the head and of the workers of a job."""
    rayjob = made(changed("helpful-ppo", {"checkpoint.storage": storage}), nodes(1))["RayJob"]
    return [pod_of(group) for group in (head(rayjob), *groups(rayjob).values())]


def test_one_container_alone_sees_the_whole_claim() -> None:
    for each in pods_of("pvc://mine/runs"):
        (maker,) = each["initContainers"]
        (mount,) = maker["volumeMounts"]
        assert mount == {"name": "claim-0", "mountPath": names.WHOLE_CLAIM}
        assert maker["command"][-3:] == [names.WHOLE_CLAIM, "runs/helpful-ppo", "mine"]
        mounts = [mount for container in each["containers"] for mount in container["volumeMounts"]]
        assert {mount.get("subPath") for mount in mounts if mount["name"] == "claim-0"} == {"runs/helpful-ppo"}
        assert maker["securityContext"] == each["containers"][0]["securityContext"]


@pytest.mark.parametrize("storage", [None, "s3://bucket/runs"])
def test_a_claim_of_the_job_itself_needs_none(storage: str | None) -> None:
    assert [each.get("initContainers") for each in pods_of(storage)] == [None, None]


def make(root: Path, path: str, user: int) -> subprocess.CompletedProcess[str]:
    """Run the container's script as a user."""
    command = ["sh", "-c", MAKE_FOLDER, "sh", str(root), path, "mine"]
    as_user = {"user": user, "group": user, "extra_groups": ()} if os.geteuid() == 0 else {}
    return subprocess.run(command, capture_output=True, text=True, check=False, **as_user)  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def root() -> Iterator[Path]:
    """The root of a claim, which every user reaches, unlike a folder of pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@needs_root
@pytest.mark.parametrize(("owner", "mode"), [(OTHER, 0o755), (0, 0o777), (OTHER, 0o2775), (OTHER, 0o700)])
def test_the_folder_has_the_permissions_of_the_claim(root: Path, owner: int, mode: int) -> None:
    os.chown(root, owner, owner)
    root.chmod(mode)
    for _ in range(2):  # the second pod finds the folder
        assert make(root, "team runs/job", OTHER).returncode == 0
    for folder in (root / "team runs", root / "team runs/job"):
        found = folder.stat()
        assert (found.st_uid, stat.S_IMODE(found.st_mode) & 0o777) == (OTHER, mode & 0o777)


@needs_root
@pytest.mark.parametrize("there", [False, True])
def test_a_refusal_names_claim_folder_user_and_remedy(root: Path, there: bool) -> None:
    if there:
        (root / "runs/job").mkdir(parents=True)
    else:
        root.chmod(0o755)
    ended = make(root, "runs/job", OTHER)
    said = ended.stdout.replace(str(OTHER), "1000")
    assert ended.returncode == 1
    assert said.startswith(f"{TOLD} ({'owner 0:0, mode 755' if there else 'mkdir: '}")
    assert "; give the folder to this user, or the claim a volume that follows fsGroup\n" in said


def test_its_words_are_what_the_job_says() -> None:
    ended = {"exitCode": 1, "reason": "Error", "message": f"{TOLD}\n"}
    statuses = [{"name": names.FOLDER_CONTAINER, "state": {"terminated": ended}}]
    (seen,) = parse.pod(pod(phase="Failed", initContainerStatuses=statuses)).containers
    assert seen == ObservedContainer(
        name=names.FOLDER_CONTAINER, exit_code=1, ended_reason="Error", last_words=f"{TOLD}\n"
    )
    world = World(spec={**SFT, "runPolicy": {"backoffLimit": 0}})
    world.settle()
    world.make_pods()
    world.change(world.head().name, phase="Failed", containers=(seen,))
    world.settle()
    failed = world.status.last_failure
    assert failed
    assert (failed.reason, failed.message, failed.node) == ("Environment", TOLD, None)
    assert world.phase == "Failed"
