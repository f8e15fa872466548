"""The programs of the test cluster: built once, kept by the hash of what they are built from.

`python -m tests.cluster.build [GROUP ...]` builds what is not there yet; without a group, what this machine can use.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf-operator" / "cluster"
OLDEST_GO = (1, 26)
GROUPS = {
    "api": ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"),
    "kuberay": ("kuberay-operator", "kuberay-crds"),
    "node": ("kubelet", "kube-proxy", "pause"),
    "dns": ("coredns",),
    "helm": ("helm",),
    "kueue": ("kueue", "kueue-config"),
}
API_GROUPS = ("api", "kuberay", "helm")
PODS_GROUPS = ("api", "kuberay", "node", "dns", "helm")
KUEUE_GROUPS = (*API_GROUPS, "kueue")


class NotBuiltError(Exception):
    """The programs are not there and nobody was asked to build them."""


def go_version() -> str:
    """What `go version` says; empty where there is no Go."""
    if not shutil.which("go"):
        return ""
    environment = {**os.environ, "GOTOOLCHAIN": "local"}
    return subprocess.run(
        ["go", "version"], env=environment, capture_output=True, text=True, check=False
    ).stdout.strip()


def no_go() -> str:
    """Why this machine cannot build, as one sentence; empty if it can."""
    words = go_version().split()
    if len(words) < 3:
        return "the test cluster needs Go 1.26 or newer to build Kubernetes, and there is no Go here"
    if tuple(int(part) for part in words[2].removeprefix("go").split(".")[:2] if part.isdigit()) < OLDEST_GO:
        return f"the test cluster needs Go 1.26 or newer to build Kubernetes, here is {words[2]}"
    return ""


def folder() -> Path:
    """Where the programs of this content are kept."""
    content = hashlib.sha256(go_version().encode())
    for path in sorted([HERE / "build.sh", *(HERE / "go").rglob("*")]):
        if path.is_file():
            content.update(f"\0{path.relative_to(HERE)}\0".encode() + path.read_bytes())
    return CACHE / content.hexdigest()[:16]


def missing(groups: Iterable[str]) -> list[str]:
    """The groups that are not built yet."""
    kept = folder()
    return [group for group in groups if not all((kept / name).exists() for name in GROUPS[group])]


def built(groups: Iterable[str]) -> Path:
    """The folder with the programs of the groups; NotBuiltError if one is not there."""
    if absent := missing(groups):
        command = f".venv/bin/python -m tests.cluster.build {' '.join(absent)}"
        raise NotBuiltError(f"programs of the test cluster are not built: run `{command}`")
    return folder()


def build(groups: Iterable[str]) -> None:
    """Build the groups that are not there yet, one session at a time; progress goes to stdout."""
    wanted = list(groups)
    if not missing(wanted):
        return
    with locked(CACHE / "build.lock"):
        for group in missing(wanted):
            print(f"building {', '.join(GROUPS[group])} (kept in {folder()})", flush=True)
            build_group(group)


def build_group(group: str) -> None:
    """Build one group beside the others and move it in when it is whole."""
    kept = folder()
    partial = kept / f"partial-{group}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    subprocess.run([HERE / "build.sh", partial, group], check=True)
    for name in GROUPS[group]:
        if (kept / name).is_dir():
            shutil.rmtree(kept / name)
        (partial / name).replace(kept / name)
    partial.rmdir()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock; says so when somebody else holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("another session builds the programs of the test cluster; waiting", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Build the groups named on the command line, or those that this machine can use."""
    from tests.cluster.capabilities import pods_cannot_run, required

    if reason := no_go():
        print(reason, file=sys.stderr)
        return int(required())
    groups = sys.argv[1:] or (API_GROUPS if pods_cannot_run() else PODS_GROUPS)
    if unknown := [group for group in groups if group not in GROUPS]:
        print(f"no such group: {', '.join(unknown)}; there are {', '.join(GROUPS)}", file=sys.stderr)
        return 2
    try:
        build(groups)
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
