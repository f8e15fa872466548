"""Kubelets that are played: pods of a namespace run as soon as they have a node, and end when they are told to.

What a pod that reads shapes says is not played: its program runs on this machine.
"""

import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Self

from rlhf_operator import names
from tests.cluster.client import Cluster
from tests.cluster.lifecycle import PODS, Document, Trainer
from tests.cluster.settings import ROOT

GONE = 404


class Kubelets:
    """Of all nodes, for one namespace. The trainer of a job is where its head pods are."""

    def __init__(self, server: Cluster, namespace: str) -> None:
        self._server, self._namespace = server, namespace
        self._trainers: dict[str, Trainer] = {}
        self._begun: set[str] = set()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=server.follow, args=(PODS.format(namespace), self._saw, self._end), daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(30)
        for trainer in self._trainers.values():
            trainer.__exit__()

    def trainer(self, job: str) -> Trainer:
        """What a job's head pods say."""
        with self._lock:
            if job not in self._trainers:
                self._trainers[job] = Trainer().__enter__()
            return self._trainers[job]

    def _saw(self, kind: str, pod: Document) -> None:
        if kind == "DELETED":
            return
        name, labels = pod["metadata"]["name"], pod["metadata"].get("labels", {})
        job, uid = labels.get(names.JOB_NAME, ""), pod["metadata"]["uid"]
        path = f"{PODS.format(self._namespace)}/{name}"
        if "deletionTimestamp" in pod["metadata"]:
            status, answer = self._server.request("DELETE", f"{path}?gracePeriodSeconds=0")
            assert status < 300 or status == GONE, f"{path}: {status} {answer}"  # `follow` tells of it again
        elif pod["spec"].get("nodeName") and uid not in self._begun:
            is_head = labels.get(names.ROLE) == names.CONTROLLER
            if is_head:
                self.trainer(job).starts(int(labels[names.ATTEMPT]))
            try:
                if labels.get(names.ROLE) == names.READER:
                    code, words = self._read(pod)
                    self._server.end_pod(self._namespace, name, code, message=words)
                else:
                    self._server.run_pod(self._namespace, name, self.trainer(job).ip if is_head else "127.0.0.1")
            except AssertionError:
                if self._server.request("GET", path)[0] != GONE:
                    raise  # `follow` tells of it again
            self._begun.add(uid)

    def _read(self, pod: Document) -> tuple[int, str]:
        """Exit code and last words of a reader's program, with the folders of its claims in the place of its mounts."""
        (container,) = pod["spec"]["containers"]
        volumes = {each["name"]: each.get("persistentVolumeClaim", {}) for each in pod["spec"]["volumes"]}
        _python, *words, _message = container["command"]
        for mount in container["volumeMounts"]:
            if claim := volumes[mount["name"]].get("claimName"):
                folder = self._server.folder_of_claim(self._namespace, claim)
                words = [word.replace(mount["mountPath"], str(folder)) for word in words]
        with tempfile.TemporaryDirectory() as folder_of_message:
            message = Path(folder_of_message) / "message"
            done = subprocess.run([sys.executable, *words, str(message)], cwd=ROOT, check=False)
            return done.returncode, message.read_text() if message.exists() else ""
