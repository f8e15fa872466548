"""Watches the jobs and RayJobs of a namespace, and whether what the operator has promised of them holds."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from rlhf_api.status import Status
from rlhf_operator import names
from tests.cluster.client import Cluster
from tests.cluster.lifecycle import JOBS, RAYJOBS, Document
from tests.operator.invariants import InvariantError, check, check_step

GONE = "DELETED"


class Witness:
    """Every version of the objects that the server sends; `complaints` is what broke a promise."""

    def __init__(self, server: Cluster, namespace: str) -> None:
        self._end = threading.Event()
        self._jobs: dict[str, Document] = {}
        self._live: dict[str, str] = {}
        self.complaints: list[str] = []
        self.versions = 0
        self.phases: dict[str, list[str]] = {}
        """Of each job, as they followed each other."""
        self._threads = [
            threading.Thread(target=server.follow, args=(path.format(namespace), saw, self._end), daemon=True)
            for path, saw in ((JOBS, self._saw_job), (RAYJOBS, self._saw_rayjob))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(10)

    def _saw_job(self, kind: str, job: Document) -> None:
        uid, name = job["metadata"]["uid"], job["metadata"]["name"]
        before = self._jobs.get(uid)
        self._jobs[uid] = job
        self.versions += 1
        phase = job.get("status", {}).get("phase", "")
        told = self.phases.setdefault(name, [])
        if phase and told[-1:] != [phase]:
            told.append(phase)
        if before is None or kind == GONE:
            return
        try:
            check_step(_status(before), _status(job), job["metadata"]["generation"])
        except (InvariantError, ValidationError) as error:
            self.complaints.append(f"{name}: {error}: {before.get('status')} -> {job.get('status')}")

    def _saw_rayjob(self, kind: str, rayjob: Document) -> None:
        metadata = rayjob["metadata"]
        job = metadata.get("labels", {}).get(names.JOB_UID)
        if job is None:
            return
        self._live.pop(metadata["uid"], None)
        if kind != GONE and "deletionTimestamp" not in metadata:
            self._live[metadata["uid"]] = job
        try:
            check(list(self._live.values()).count(job) <= 1, f"{metadata['name']} is not the only live attempt")
        except InvariantError as error:
            self.complaints.append(str(error))


def _status(job: Document) -> Status:
    return Status.model_validate(job.get("status", {}), by_alias=True, by_name=False)


@contextmanager
def witness(server: Cluster, namespace: str) -> Iterator[Witness]:
    """One that has seen nothing wrong in the end, and has seen something."""
    made = Witness(server, namespace)
    made.start()
    try:
        yield made
    finally:
        made.stop()
    assert made.versions
    assert not made.complaints
