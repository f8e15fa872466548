"""Pages of `rlhf ui` about a namespace's jobs, whose small files are copied to this machine again and again."""

import io
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import typer

from rlhf_api import kubectl_yaml
from rlhf_api.names import API_VERSION, KIND
from rlhf_api.problems import SpecError
from rlhf_kubectl.files import CLAIM, CONTAINER, claim_pod, sizes_in
from rlhf_kubectl.jobs import ENDED_PHASES, head_of, list_jobs, pods_of
from rlhf_kubectl.kubectl import Kubectl, KubectlError
from rlhf_operator import names
from rlhf_operator.reconcile.context import parse_job
from rlhf_operator.resources.storage import run_folder
from rlhf_operator.snapshot import ObservedJob
from rlhf_planning.numbers import size_text

SUFFIXES: Final = (".json", ".jsonl", ".yaml", ".log")
MAX_BYTES: Final = 64 << 20
"""Size above which a file, such as one of many rollouts, is not copied."""
REFRESH_SECONDS, DEPTH = 10.0, 2
TAR: Final = 'cd "$1" && shift && tar -cf - -- "$@"; test $? -lt 2'
"""Shell script that writes files as a tar stream; tar ends with 1 if a file grew meanwhile."""


def show_jobs(kubectl: Kubectl, *, port: int, image: str | None) -> int:
    """Serve pages about the namespace's jobs by `rlhf ui` until it ends, and return its exit code; 0 after Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with TemporaryDirectory(prefix="kubectl-rlhf-ui-") as made:
        copies = Copies(kubectl, Path(made) / kubectl.namespace, image)
        copies.update(claims=False)
        server = subprocess.Popen([sys.executable, "-m", "rlhf_trainer", "ui", str(copies.folder), f"--port={port}"])
        try:
            while server.poll() is None:
                copies.update()
                time.sleep(REFRESH_SECONDS if server.poll() is None else 0.0)
        except KeyboardInterrupt:
            return 0
        finally:
            server.terminate()
            server.wait()
    return server.returncode


@dataclass
class Copies:
    """Run folders with the small files of a namespace's jobs: <folder>/<job>/<job>/."""

    kubectl: Kubectl
    folder: Path
    image: str | None = None
    """Image of the pods that read claims; None: each job's own image."""
    _read: set[tuple[str, int, str]] = field(default_factory=set)
    """(uid, attempt, phase) of jobs whose claims have been read."""
    _printed: set[str] = field(default_factory=set)

    def update(self, *, claims: bool = True) -> None:
        """Write each job's status; copy the files of running jobs, and the files of one ended job from its claim.

        claims: whether to read a claim, for which a pod is started. A failure is printed once.
        """
        try:
            jobs = list_jobs(self.kubectl)
        except KubectlError as error:
            self._print(f"not up to date: {error}")
            return
        self.folder.mkdir(exist_ok=True)
        for gone in {each.name for each in self.folder.iterdir()} - {job.name for job in jobs}:
            shutil.rmtree(self.folder / gone)
        for job in jobs:
            self._write(job)
        for job in reversed(jobs):
            if job.status.attempt:
                claims = self._copy(job, job.status.attempt, claims=claims)

    def _write(self, job: ObservedJob) -> None:
        """Write what the API server knows of a job, in the form of files that a trainer writes."""
        folder = self.folder / job.name / job.name
        folder.mkdir(parents=True, exist_ok=True)
        document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": job.name}, "spec": job.spec}
        texts = {} if (folder / "job.yaml").exists() else {"job.yaml": kubectl_yaml.write(document)}
        texts |= {
            "../.attempt": f"{job.status.attempt or 1} {job.uid}",
            "status.json": json.dumps(job.status.document()),
        }
        for name, text in texts.items():
            (folder / ".unfinished").write_text(text)
            (folder / ".unfinished").replace(folder / name)

    def _copy(self, job: ObservedJob, attempt: int, *, claims: bool) -> bool:
        """Copy a job's files from its head pod, or else from its claim; return whether a claim may still be read."""
        try:
            head = head_of(job, pods_of(self.kubectl, job))
            if head and head.phase == "Running" and job.status.phase not in ENDED_PHASES:
                self._copy_from(job, head.name, names.LOG_CONTAINER, names.OUTPUT_FOLDER)
            elif claims and (key := (job.uid, attempt, job.status.phase)) not in self._read:
                claims = False
                self._read.add(key)  # also after a failure, as each try starts a pod
                place = run_folder(parse_job(job))
                with claim_pod(self.kubectl, job, place.claim, self.image) as pod:
                    self._copy_from(job, pod, CONTAINER, f"{CLAIM}/{place.path}".rstrip("/"))
        except (KubectlError, SpecError, OSError, tarfile.TarError) as error:  # SpecError: another version's job
            self._print(f"files of {job.name} are not copied: {error}")
        return claims

    def _copy_from(self, job: ObservedJob, pod: str, container: str, source: str) -> None:
        """Copy the small files of a run folder in a pod, all but status.json."""
        inside = ("exec", f"--namespace={job.namespace}", pod, f"--container={container}", "--")
        sizes = sizes_in(self.kubectl, inside, source, DEPTH)
        shown = [path for path in sizes if path.endswith(SUFFIXES) and not path.endswith("/status.json")]
        for path in (path for path in shown if sizes[path] > MAX_BYTES):
            self._print(f"{path} of {job.name} is not copied: it has more than {size_text(MAX_BYTES)}")
        if not (paths := [path for path in shown if sizes[path] <= MAX_BYTES]):
            return
        stream = io.BytesIO(self.kubectl.run(*inside, "sh", "-c", TAR, "sh", source, *paths))
        with TemporaryDirectory(dir=self.folder.parent) as unfinished, tarfile.open(fileobj=stream) as files:
            files.extractall(unfinished, filter="data")
            for path in paths:
                (self.folder / job.name / path).parent.mkdir(exist_ok=True)
                (Path(unfinished) / path).replace(self.folder / job.name / path)

    def _print(self, sentence: str) -> None:
        if sentence not in self._printed:
            typer.echo(sentence, err=True)
            self._printed.add(sentence)
