"""Kubelets that are played: pods of a namespace run as soon as they have a node, and end when they are told to."""

import threading
from contextlib import suppress
from typing import Self

from rlhf_operator import names
from tests.cluster.client import Cluster
from tests.cluster.lifecycle import PODS, Document, Trainer


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
            self._server.request("DELETE", f"{path}?gracePeriodSeconds=0")
        elif pod["spec"].get("nodeName") and uid not in self._begun:
            is_head = labels.get(names.ROLE) == names.CONTROLLER
            if is_head:
                self.trainer(job).starts(int(labels[names.ATTEMPT]))
            with suppress(AssertionError):  # it has gone meanwhile
                self._server.run_pod(self._namespace, name, self.trainer(job).ip if is_head else "127.0.0.1")
                self._begun.add(uid)
