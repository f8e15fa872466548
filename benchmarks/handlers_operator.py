"""Operator in kopf's usual style that does the same work as ours, for benchmarks/operators.py.

Handlers of create, update and resume and a timer, which bring a finalizer and kopf's annotations with them. What is to
be done about a job, the requests and their number at once are our operator's own; watching, queueing, retries and the
writing of the status are kopf's.

    python benchmarks/handlers_operator.py CONFIG
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kopf

from rlhf_api.names import GROUP, VERSION
from rlhf_operator import names
from rlhf_operator.actions import Create, Plan
from rlhf_operator.cluster import parse
from rlhf_operator.cluster.client import CONFLICT, ApiError, Client
from rlhf_operator.cluster.resources import CLAIMS, CREATED, NODES, PODS, RAYJOBS
from rlhf_operator.reconcile.decide import decide
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Document, ObservedClaim, ObservedJob, Snapshot

PLURAL = "rlhfjobs"
TIMER_SECONDS = 15.0
MAX_PASSES = 8
"""Limit of passes in one call of a handler; the handler stops earlier when nothing is left to do."""
BEGAN = datetime.now(UTC)


@dataclass
class Means:
    """State that the handlers share."""

    client: Client
    settings: Settings


MEANS: list[Means] = []


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.posting.level = 100
    settings.persistence.finalizer = f"{GROUP}/handlers"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    MEANS.append(Means(await Client.connect(None), Settings.read(Path(sys.argv[1]))))


@kopf.on.cleanup()
async def end(**_: Any) -> None:
    await MEANS[0].client.close()


@kopf.on.resume(GROUP, VERSION, PLURAL)
@kopf.on.create(GROUP, VERSION, PLURAL)
@kopf.on.update(GROUP, VERSION, PLURAL, field="spec")
@kopf.timer(GROUP, VERSION, PLURAL, interval=TIMER_SECONDS, initial_delay=TIMER_SECONDS)
async def reconcile(body: kopf.Body, patch: kopf.Patch, **_: Any) -> None:
    """Passes until nothing is left to do at once; kopf writes the status."""
    means = MEANS[0]
    document: dict[str, Any] = dict(body)
    for _pass in range(MAX_PASSES):
        job = parse.job(document)
        plan = decide(await look(means.client, job), datetime.now(UTC), means.settings)
        for event in plan.events:
            kopf.event(body, type=event.kind, reason=event.reason, message=event.message)
        written = await act(means.client, job.namespace, plan)
        changed = plan.status != job.status
        if changed:
            document = {**document, "status": plan.status.document()}
            patch.status.update(plan.status.document())
        if not changed and not written:
            return


async def look(client: Client, job: ObservedJob) -> Snapshot:
    """The job with all that belongs to it, as the server says now."""
    selector = f"{names.JOB_NAME}={job.name}"
    rayjobs = await client.list(RAYJOBS, job.namespace, selector)
    pods = await client.list(PODS, job.namespace, selector)
    claims = await client.list(CLAIMS, job.namespace, selector)
    nodes = await client.list(NODES, None)
    return Snapshot(
        job=job,
        rayjobs=tuple(parse.parse_rayjob(each, job.uid) for each in rayjobs.items),
        pods=tuple(parse.pod(each) for each in pods.items),
        claims={each.name: each for each in (claim(document, job.uid) for document in claims.items)},
        nodes=tuple(parse.node(each) for each in nodes.items),
        watching_since=BEGAN,
        fresh=True,
    )


def claim(document: Document, job_uid: str) -> ObservedClaim:
    """A claim as the job of this uid sees it."""
    return ObservedClaim(name=document["metadata"]["name"], owned=job_uid in parse.owners(document))


async def act(client: Client, namespace: str, plan: Plan) -> bool:
    """Make what is to be made; whether anything was."""
    made = False
    for action in plan.actions:
        if isinstance(action, Create):
            made = await create(client, namespace, action.manifest) or made
    return made


async def create(client: Client, namespace: str, manifest: Document) -> bool:
    """Create an object, and return True if it did not exist before."""
    kind = CREATED[manifest["apiVersion"], manifest["kind"]]
    try:
        await client.call("POST", kind.path(namespace), kind=kind.plural, body=manifest)
    except ApiError as error:
        if error.status == CONFLICT:
            return False
        raise
    return True


if __name__ == "__main__":
    watched = Settings.read(Path(sys.argv[1])).namespaces
    kopf.run(clusterwide=not watched, namespaces=list(watched), standalone=True)
