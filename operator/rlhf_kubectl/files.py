"""Files of a job's claim, copied or shown by a pod that mounts the claim read-only and is deleted afterwards."""

import shutil
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final, cast

from rich.console import Console
from rich.progress import wrap_file

from rlhf_api.exit_codes import ExitCode
from rlhf_api.tables import read_table
from rlhf_kubectl.kubectl import Kubectl, KubectlError, require_success
from rlhf_kubectl.why import complaint
from rlhf_operator.cluster import parse, raw
from rlhf_operator.cluster.resources import PODS
from rlhf_operator.overlay import merged
from rlhf_operator.reconcile.context import parse_job
from rlhf_operator.resources import identity
from rlhf_operator.resources.storage import PVC, Place, run_folder
from rlhf_operator.snapshot import ObservedJob

POD: Final = read_table(__package__, "claim_pod.yaml", dict[str, Any])
CLAIM: Final = "/claim"
CONTAINER: Final = "files"
START_SECONDS: Final = 300.0
"""Seconds within which the pod that mounts the claim must run."""
POLL_SECONDS: Final = 0.5
SIZES: Final = 'cd "$1" && find . -maxdepth "$2" -type f ! -path "*\n*" -exec stat -c "%s %n" {} +'
"""Shell script that prints bytes and path of each file, a line each; it leaves out paths of more than one line."""
ANY_DEPTH: Final = 99


def fetch(kubectl: Kubectl, job: ObservedJob, folder: Path, image: str | None) -> tuple[int, int]:
    """Copy the output of a job into a new folder, and return (files, bytes).

    The folder appears when all files are whole. KubectlError if there is no output, or the copy breaks off.
    """
    if not job.output_uri.startswith(PVC):
        message = f"{job.name} has made nothing yet, it is {job.status.phase}; kubectl rlhf why {job.name}"
        raise KubectlError(message, ExitCode.SPEC)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise KubectlError(f"{folder}: is there already and not empty; name a new folder", ExitCode.SPEC)
    place = Place.of(job.output_uri)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    try:
        with claim_pod(kubectl, job, place.claim, image) as pod:
            _copy(kubectl, pod, job, f"{CLAIM}/{place.path}", unfinished)
        unfinished.rename(folder)
    except OSError as error:
        raise KubectlError(f"{error.filename or unfinished}: cannot be written: {error.strerror}") from None
    sizes = _sizes_here(folder)
    return len(sizes), sum(sizes.values())


def show(kubectl: Kubectl, job: ObservedJob, file: str, image: str | None) -> None:
    """Print a file of a job's run folder to stdout."""
    place = run_folder(parse_job(job))
    with claim_pod(kubectl, job, place.claim, image) as pod:
        path = "/".join(part for part in (CLAIM, place.path, file) if part)
        kubectl.stream("exec", f"--namespace={job.namespace}", pod, f"--container={CONTAINER}", "--", "cat", path)


@contextmanager
def claim_pod(kubectl: Kubectl, job: ObservedJob, claim: str, image: str | None) -> Iterator[str]:
    """Run a pod that mounts the claim during the block, and yield the pod's name."""
    used = image_for(job, image)
    pods = PODS.path(job.namespace)
    pod = raw.text(kubectl.create(pods, manifest(job, claim, used)), "metadata", "name")
    try:
        print(f"pod {pod} mounts {claim}", file=sys.stderr)  # noqa: T201 so that a user knows what it waits for
        _wait(kubectl, f"{pods}/{pod}")
        yield pod
    finally:
        kubectl.delete(f"{pods}/{pod}?gracePeriodSeconds=0")


def image_for(job: ObservedJob, image: str | None) -> str:
    """Return the requested image, or else that of the job's pods. KubectlError if it is unknown."""
    if used := image or job.status.image:
        return used
    lacks = f"no attempt of {job.name} has its image in the status (status.image)"
    raise KubectlError(f"{lacks}: name an image with sh and tar by --image")


def manifest(job: ObservedJob, claim: str, image: str) -> dict[str, Any]:
    """Return the manifest of a pod that mounts the claim and only sleeps, without a service account token."""
    runtime = parse_job(job).spec.runtime
    secrets = job.status.image_pull_secrets or runtime.image_pull_secrets
    own = {
        "metadata": {"generateName": f"{job.name[:40]}-files-", "ownerReferences": [identity.owner(job)]},
        "spec": {
            **identity.pod_security(runtime.model_copy(update={"image_pull_secrets": secrets})),
            "containers": [
                {"name": CONTAINER, "image": image, "securityContext": identity.fixed_part("container_security")}
            ],
            "volumes": [{"name": "claim", "persistentVolumeClaim": {"claimName": claim}}],
        },
    }
    document: dict[str, Any] = merged(POD, own)
    return document


def _wait(kubectl: Kubectl, path: str) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        pod = parse.pod(kubectl.get(path))
        if pod.ready:
            return
        obstacle = complaint(pod, datetime.now(UTC))
        if pod.phase == "Failed" or time.monotonic() > end:
            raise KubectlError(obstacle or f"pod {pod.name} does not run")
        time.sleep(POLL_SECONDS)


def _copy(kubectl: Kubectl, pod: str, job: ObservedJob, source: str, target: Path) -> None:
    """Copy a folder of a pod to `target`, as one tar stream. KubectlError if a file's size differs from the pod's."""
    inside = ("exec", f"--namespace={job.namespace}", pod, f"--container={CONTAINER}", "--")
    sizes = sizes_in(kubectl, inside, source, ANY_DEPTH)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with kubectl.start(*inside, "tar", "-C", source, "-cf", "-", ".") as process:
        broken = _unpack(cast("IO[bytes]", process.stdout), target, sum(sizes.values()))
        _, stderr = process.communicate()
    require_success(process.returncode, stderr)
    here = _sizes_here(target)
    wrong = sorted(path for path in sizes if here.get(path) != sizes[path])
    if broken or wrong:
        what = f"{wrong[0]} has {here.get(wrong[0], 0):,} of {sizes[wrong[0]]:,} bytes" if wrong else broken
        raise KubectlError(f"the copy broke off: {what}; {target} is not whole")


def sizes_in(kubectl: Kubectl, inside: Sequence[str], folder: str, depth: int) -> dict[str, int]:
    """Return the bytes of files down to a depth in a folder of a pod, by path; inside: kubectl's words up to `--`."""
    lines = kubectl.run(*inside, "sh", "-c", SIZES, "sh", folder, str(depth)).decode(errors="surrogateescape")
    pairs = (line.partition(" ") for line in lines.split("\n") if line)
    return {path.removeprefix("./"): int(size) for size, _, path in pairs}


def _unpack(stream: IO[bytes], target: Path, total: int) -> str:
    """Write the files of a tar stream to `target`; return why the stream broke off, or an empty text."""
    console = Console(stderr=True)
    progress = wrap_file(cast("Any", stream), total, description="copying", console=console, transient=True)
    with progress as watched:
        try:
            with tarfile.open(fileobj=cast("IO[bytes]", watched), mode="r|") as files:
                files.extractall(target, filter="data")
        except (tarfile.TarError, EOFError) as error:
            return str(error) or "the stream ended early"
    return ""


def _sizes_here(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
