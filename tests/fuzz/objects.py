"""Damaged objects of the API server and answers of pods, and the operator's passes over what it makes of them."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_api import kubectl_yaml
from rlhf_api.names import API_VERSION, KIND
from rlhf_api.status import Status
from rlhf_operator import names
from rlhf_operator.actions import ReadLive
from rlhf_operator.cluster.cache import Cache, KindName
from rlhf_operator.cluster.client import Client
from rlhf_operator.cluster.discovery import Offer
from rlhf_operator.cluster.heartbeats import Heartbeats, parsed
from rlhf_operator.cluster.observe import Observer
from rlhf_operator.reconcile.decide import decide
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import ObservedPod, Snapshot
from tests.fuzz.commands import Case, right_manifests
from tests.fuzz.damage import as_json, damaged, encoded, torn
from tests.operator.fake_trainer import START
from tests.operator.simulated import UID, World

KEY = ("team", "job")
OWNER = {"apiVersion": API_VERSION, "kind": KIND, "name": "job", "uid": UID, "controller": True}
LABELS = {names.JOB_NAME: "job", names.ATTEMPT: "1", names.MANAGED_BY: names.OPERATOR}
TIME = "2026-01-31T12:00:00Z"
CONTAINER = {"name": names.HEAD_CONTAINER, "state": {"running": {"startedAt": TIME}}, "lastState": {}}
READY = {"type": "Ready", "status": "True", "lastTransitionTime": TIME, "reason": "R", "message": "m"}
PODS: dict[str, dict[str, Any]] = {
    role: {
        "metadata": {"name": role, "labels": {**LABELS, names.ROLE: role}, "ownerReferences": [OWNER]},
        "spec": {
            "nodeName": "n0",
            "terminationGracePeriodSeconds": 30,
            "containers": [{"name": "x", "resources": {"requests": {"memory": "1Gi", "nvidia.com/gpu": "1"}}}],
        },
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [READY, READY | {"type": "PodScheduled", "status": "False"}],
            "containerStatuses": [
                CONTAINER,
                {**CONTAINER, "state": {"terminated": {"exitCode": 1, "reason": "Error"}}},
            ],
        },
    }
    for role in (names.CONTROLLER, names.WORKER, names.READER)
}
OBJECTS: list[tuple[KindName, dict[str, Any]]] = [
    *(("pods", pod) for pod in PODS.values()),
    (
        "rayjobs",
        {
            "metadata": {"name": "job-a1", "labels": LABELS, "ownerReferences": [OWNER]},
            "spec": {"suspend": False},
            "status": {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING", "message": "", "startTime": TIME},
        },
    ),
    (
        "nodes",
        {
            "metadata": {"name": "n0", "labels": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}},
            "spec": {"taints": [{"key": "a", "value": "b", "effect": "NoSchedule"}]},
            "status": {
                "conditions": [READY],
                "allocatable": {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"},
            },
        },
    ),
    (
        "claims",
        {
            "metadata": {"name": "job-output", "ownerReferences": [OWNER]},
            "spec": {"resources": {"requests": {"storage": "1Gi"}}},
            "status": {"capacity": {"storage": "1Gi"}},
        },
    ),
    (
        "quotas",
        {
            "metadata": {"name": "w", "ownerReferences": [OWNER | {"kind": "RayJob", "name": "job-a1"}]},
            "status": {"conditions": [{"type": "QuotaReserved", "status": "True", "message": ""}]},
        },
    ),
]
OFFER = Offer(capabilities=frozenset({"kuberay", "kueue", "nodes"}), kinds=())


class Answers(Heartbeats):
    """Heartbeats of a pod that answers what it is told to."""

    body = b"{}"

    async def _ask(self, ip: str) -> Any:
        assert ip
        try:
            return parsed(self.body)
        except ValueError:
            return None


def objects(_: Path) -> Case:
    """Passes over one job and what belongs to it."""
    loop, histories = asyncio.new_event_loop(), _statuses()
    specs = [document["spec"] for text in right_manifests() for document in kubectl_yaml.read(text, "")]
    head = ObservedPod(name="head", uid="u", attempt=1, role=names.CONTROLLER, ip="10.0.0.1", created=START)

    async def seen(dice: random.Random) -> Snapshot:
        cache, settings = Cache(), Settings()
        answers = Answers(lambda: START)
        try:
            observer = Observer(_no_client(), cache, answers, settings, lambda keys: None)
            observer.offer = OFFER
            spec, status = dice.choice(specs), dice.choice(histories)
            cache.put("jobs", _damaged(dice, {"metadata": {"name": "job"}, "spec": spec, "status": status}))
            for kind, document in OBJECTS:
                if dice.random() < 0.7:
                    cache.put(kind, _damaged(dice, document))
            answer = encoded(as_json(damaged(dice, {"attempt": 1, "jobUid": UID, "status": status, "complete": True})))
            answers.body = torn(dice, answer) if dice.random() < 0.2 else answer
            await answers.read(UID, head)
            found = await observer.observe(KEY, fresh=False, since=START)
            assert found is not None
            return found
        finally:
            await answers.close()

    def case(dice: random.Random) -> str:
        snapshot = loop.run_until_complete(seen(dice))
        plan = decide(snapshot, START, Settings())
        if any(isinstance(each, ReadLive) for each in plan.actions):
            plan = decide(replace(snapshot, fresh=True), START, Settings())
        document = plan.status.document()
        json.dumps(document, allow_nan=False).encode()
        assert Status.model_validate(document, by_alias=True, by_name=False) == plan.status
        assert not any(each.reason == "MapperError" for each in plan.status.conditions), plan.status.conditions
        return plan.status.phase

    return case


def _damaged(dice: random.Random, document: dict[str, Any]) -> dict[str, Any]:
    """The object with damage where the API server lets anything be, as strict JSON."""
    given = {"namespace": "team", "uid": UID, "resourceVersion": "7", "generation": 1, "creationTimestamp": TIME}
    found = damaged(dice, document) if dice.random() < 0.5 else copy.deepcopy(document)
    found = found if isinstance(found, dict) else {}
    metadata: Any = found.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    return {**found, "metadata": {**metadata, **given, "name": document["metadata"]["name"]}}


def _no_client() -> Client:
    """Nothing is read live here."""
    client: Any = None
    return client  # type: ignore[no-any-return]


def _statuses() -> list[dict[str, Any]]:
    """What stands in the status of a job at some moments of its life."""
    world = World()
    found: list[dict[str, Any]] = [{}]
    for happens in (
        world.operate,
        world.settle,
        world.make_pods,
        world.start_pods,
        lambda: world.train(3),
        world.settle,
    ):
        happens()
        found.append(world.status.document())
    return found
