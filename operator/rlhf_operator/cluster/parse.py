"""Parsers of Kubernetes objects into the operator's own values; no content of an object makes them fail."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from pydantic import ValidationError

from rlhf_api.names import KIND
from rlhf_api.quantities import amount
from rlhf_api.status import MAX_LOSSES, Status
from rlhf_operator import names, snapshot
from rlhf_operator.cluster import raw
from rlhf_operator.snapshot import Document, requests_of

REFUSED_POD: Final = re.compile(r'[Pp]ods? "[^"]*" is (?:forbidden|invalid): ')
"""Beginning of the API server's refusal of a pod, removed because the pod has another name in each try."""
HAD_DEFAULTS: Final = frozenset(f"spec.runtime.{field}" for field in ("hostNetwork", "nodeSelector", "tolerations"))
"""Fields that specs had in earlier releases, with a default."""
LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
MAX_ATTEMPT_DIGITS: Final = 6
MAX_INTEGER: Final = 2**63 - 1  # that the API server accepts
MAX_SECONDS: Final = 10**7
MAX_TERMINATION_MESSAGE: Final = 4096  # bytes that a kubelet keeps
NEVER_RAN: Final = ("StartError", "ContainerCannotRun")  # reasons of a container whose command could not be started


def status(document: object) -> Status:
    """Return a job's status without the fields that cannot be read."""
    given = {field: value for field, value in raw.mapping(document).items() if _storable(value)}
    try:
        return _status(given)
    except ValidationError as error:
        wrong = {each["loc"][0] for each in error.errors()}
        return _status({field: value for field, value in given.items() if field not in wrong})


def _status(document: Mapping[str, Any]) -> Status:
    return Status.model_validate(document, by_alias=True, by_name=False)


def _storable(value: object) -> bool:
    if isinstance(value, int):
        return abs(value) <= MAX_INTEGER
    if isinstance(value, Mapping):
        return all(_storable(each) for each in value.values())
    return all(_storable(each) for each in value) if isinstance(value, list) else True


def job(document: Document) -> snapshot.ObservedJob:
    return snapshot.ObservedJob(
        namespace=raw.text(document, "metadata", "namespace"),
        name=raw.text(document, "metadata", "name"),
        uid=raw.text(document, "metadata", "uid"),
        generation=raw.number(document, "metadata", "generation") or 0,
        resource_version=raw.text(document, "metadata", "resourceVersion"),
        created=raw.time(document, "metadata", "creationTimestamp") or raw.LONG_AGO,
        deleting=bool(raw.text(document, "metadata", "deletionTimestamp")),
        labels=raw.texts(document, "metadata", "labels"),
        spec=raw.mapping(document, "spec"),
        status=status(document.get("status")),
        lost_fields=_lost_fields(document),
    )


def _lost_fields(document: Document) -> tuple[str, ...]:
    """Return the fields of a spec that have an owner (metadata.managedFields) but are missing.

    The creator of an object owns its defaults, too, so a field of HAD_DEFAULTS counts only if it was not empty. For
    lists and scalars only the annotation of `kubectl apply` shows this. A server-side apply owns no defaults.
    """
    lost: set[str] = set()
    written = None  # the object that was given to the last client-side `kubectl apply`
    with suppress(ValueError, RecursionError):
        written = json.loads(raw.text(document, "metadata", "annotations", LAST_APPLIED))
    for each in raw.entries(document, "metadata", "managedFields"):
        fields = _missing(raw.mapping(each, "fieldsV1", "f:spec"), document.get("spec"), "spec")
        is_applied = each.get("operation") == "Apply"
        for path, is_empty in fields:
            if is_applied or not is_empty or path not in HAD_DEFAULTS or raw.at(written, *path.split(".")):
                lost.add(path)
    return tuple(sorted(lost))[:MAX_LOSSES]


def _missing(owned: Mapping[str, Any], value: object, path: str) -> Iterator[tuple[str, bool]]:
    """Yield (path, whether nothing in it is owned) of each owned field that a value lacks.

    owned: parts of managedFields by `f:` and a name, or by `k:` and the key of a list's entry.
    """
    entries = value if isinstance(value, list) else []
    there = {f'k:{{"name":"{each.get("name")}"}}': each for each in entries if isinstance(each, Mapping)}
    if isinstance(value, Mapping):
        there = {f"f:{name}": each for name, each in value.items()}
        gone = (key for key in owned if key.startswith("f:") and key not in there)
        yield from ((f"{path}.{key[2:]}", not owned[key]) for key in gone)
    for key in owned.keys() & there.keys():
        name = key[2:] if key.startswith("f:") else there[key]["name"]
        yield from _missing(raw.mapping(owned, key), there[key], f"{path}.{name}")


def owner(document: Document) -> tuple[str, str, str]:
    """Return (kind, name, uid) of the owner that controls an object; empty if there is none."""
    references = raw.entries(document, "metadata", "ownerReferences")
    found = next((each for each in references if each.get("controller") is True), None)
    return raw.text(found, "kind"), raw.text(found, "name"), raw.text(found, "uid")


def owners(document: Document) -> frozenset[str]:
    """Return the uids of all owners of an object."""
    return frozenset(raw.text(each, "uid") for each in raw.entries(document, "metadata", "ownerReferences"))


def kept_for(document: Document) -> str:
    """Return the name of the job for which the operator made this retained claim; empty for other or deleted claims."""
    labels = raw.texts(document, "metadata", "labels")
    has_owner = any(each.get("kind") == KIND for each in raw.entries(document, "metadata", "ownerReferences"))
    if has_owner or labels.get(names.MANAGED_BY) != names.OPERATOR or raw.at(document, "metadata", "deletionTimestamp"):
        return ""
    return labels.get(names.JOB_NAME, "")


def _attempt(document: Document) -> int:
    label = raw.text(document, "metadata", "labels", names.ATTEMPT)
    return int(label) if label.isascii() and label.isdigit() and len(label) <= MAX_ATTEMPT_DIGITS else 0


def parse_rayjob(document: Document, job_uid: str = "") -> snapshot.ObservedRayJob:
    """Parse a RayJob; `owned` tells whether the job with `job_uid` controls it."""
    return snapshot.ObservedRayJob(
        name=raw.text(document, "metadata", "name"),
        uid=raw.text(document, "metadata", "uid"),
        attempt=_attempt(document),
        owned=bool(job_uid) and owner(document)[2] == job_uid,
        created=raw.time(document, "metadata", "creationTimestamp") or raw.LONG_AGO,
        deleting=bool(raw.text(document, "metadata", "deletionTimestamp")),
        suspended=raw.at(document, "spec", "suspend") is True,
        deployment_status=raw.text(document, "status", "jobDeploymentStatus"),
        job_status=raw.text(document, "status", "jobStatus"),
        message=raw.text(document, "status", "message"),
        started=raw.time(document, "status", "startTime"),
        refused=_refused(document),
        cluster=raw.text(document, "status", "rayClusterName"),
    )


def _refused(document: Document) -> str:
    """Return why the API server refused pods of a RayJob, which KubeRay shows in its status; else empty."""
    failure = raw.find_condition({"status": raw.mapping(document, "status", "rayClusterStatus")}, "ReplicaFailure")
    is_so = failure.get("status") == "True" and raw.text(failure, "reason").startswith("FailedCreate")
    return REFUSED_POD.sub("", raw.text(failure, "message").partition("\n")[2]) if is_so else ""


def complaint(document: Document) -> tuple[str, str]:
    """Return (time of the last occurrence, note) of an event."""
    last = raw.text(document, "series", "lastObservedTime") or raw.text(document, "deprecatedLastTimestamp")
    return last or raw.text(document, "eventTime"), REFUSED_POD.sub("", raw.text(document, "note"))


def pod(document: Document) -> snapshot.ObservedPod:
    labels = raw.texts(document, "metadata", "labels")
    ready, scheduled = raw.find_condition(document, "Ready"), raw.find_condition(document, "PodScheduled")
    disrupted = raw.find_condition(document, "DisruptionTarget")
    deletion = raw.time(document, "metadata", "deletionTimestamp")
    requested = raw.number(document, "metadata", "deletionGracePeriodSeconds")
    planned = raw.number(document, "spec", "terminationGracePeriodSeconds")
    seconds = requested if requested is not None else planned if planned is not None else 30
    grace, phase = min(max(seconds, 0), MAX_SECONDS), raw.text(document, "status", "phase")
    # For a silent node the control plane writes Ready=False without a reason; a kubelet gives a reason.
    is_silent = phase == "Running" and ready.get("status") == "False" and not raw.text(ready, "reason")
    return snapshot.ObservedPod(
        name=raw.text(document, "metadata", "name"),
        uid=raw.text(document, "metadata", "uid"),
        attempt=_attempt(document),
        role=labels.get(names.ROLE, ""),
        pool=labels.get(names.POOL, ""),
        phase=phase or "Pending",
        ready=ready.get("status") == "True",
        node=raw.text(document, "spec", "nodeName"),
        ip=raw.text(document, "status", "podIP"),
        reason=raw.text(document, "status", "reason"),
        message=raw.text(document, "status", "message"),
        disruption=raw.text(disrupted, "reason") if disrupted.get("status") == "True" else "",
        unschedulable=raw.text(scheduled, "message") if scheduled.get("status") == "False" else "",
        scheduled=raw.time(scheduled, "lastTransitionTime") if scheduled.get("status") == "True" else None,
        created=raw.time(document, "metadata", "creationTimestamp") or raw.LONG_AGO,
        not_ready_since=raw.time(ready, "lastTransitionTime") if ready.get("status") != "True" else None,
        silent_since=raw.time(ready, "lastTransitionTime") if is_silent else None,
        # Kubernetes writes the end of the grace period as deletionTimestamp.
        deleting_since=deletion - timedelta(seconds=grace) if deletion else None,
        grace_seconds=grace,
        requests={} if phase in ("Succeeded", "Failed") else dict(requests_of(_requesting_fields(document))),
        containers=tuple(_containers(document)),
    )


def slim_pod(document: Document) -> Document:
    """Reduce a pod that belongs to no job to its node and its requests; return a pod of a job unchanged."""
    if raw.text(document, "metadata", "labels", names.JOB_NAME):
        return document
    identity = ("namespace", "name", "uid", "resourceVersion")
    return {
        "metadata": {name: raw.text(document, "metadata", name) for name in identity},
        "spec": {"nodeName": raw.text(document, "spec", "nodeName"), **_requesting_fields(document)},
        "status": {"phase": raw.text(document, "status", "phase")},
    }


def _requesting_fields(document: Document) -> dict[str, Any]:
    """Return the fields of a pod's spec that determine its requests; the API server has filled in missing requests."""

    def fields(container: Document) -> Document:
        requests = raw.texts(container, "resources", "requests")
        return {"resources": {"requests": requests}, "restartPolicy": raw.text(container, "restartPolicy")}

    parts = ("containers", "initContainers")
    return {
        "overhead": raw.texts(document, "spec", "overhead"),
        **{part: [fields(each) for each in raw.entries(document, "spec", part)] for part in parts},
    }


def _containers(document: Document) -> Iterator[snapshot.ObservedContainer]:
    role = raw.text(document, "metadata", "labels", names.ROLE)
    for part in ("initContainerStatuses", "containerStatuses"):
        for each in raw.entries(document, "status", part):
            # A container that waits for a restart has ended before.
            state = "lastState" if raw.mapping(each, "state", "waiting") else "state"
            ended = raw.mapping(each, "state", "terminated") or raw.mapping(each, state, "terminated")
            name, reason = raw.text(each, "name"), raw.text(ended, "reason")
            never_ran = role == names.SANDBOX and reason in NEVER_RAN  # other messages may come from the model's code
            speaks = role == names.READER or name == names.FOLDER_CONTAINER or never_ran
            yield snapshot.ObservedContainer(
                name=name,
                running=bool(raw.mapping(each, "state", "running")),
                waiting_reason=raw.text(each, "state", "waiting", "reason"),
                waiting_message=raw.text(each, "state", "waiting", "message"),
                exit_code=raw.number(ended, "exitCode"),
                ended_reason=reason,
                last_words=raw.text(ended, "message")[:MAX_TERMINATION_MESSAGE] if speaks else "",
            )


def node(document: Document) -> snapshot.ObservedNode:
    taints, ready = raw.entries(document, "spec", "taints"), raw.find_condition(document, "Ready")
    return snapshot.ObservedNode(
        name=raw.text(document, "metadata", "name"),
        ready=ready.get("status") == "True",
        not_ready_since=raw.time(ready, "lastTransitionTime") if ready.get("status") != "True" else None,
        schedulable=raw.at(document, "spec", "unschedulable") is not True,
        labels=raw.texts(document, "metadata", "labels"),
        taints=tuple((raw.text(each, "key"), raw.text(each, "value"), raw.text(each, "effect")) for each in taints),
        allocatable=raw.texts(document, "status", "allocatable"),
    )


def priority(document: Document) -> tuple[int, bool]:
    """Return (value, whether the class is the cluster's default) of a PriorityClass."""
    return raw.number(document, "value") or 0, raw.at(document, "globalDefault") is True


def device_slice(document: Document) -> tuple[str, str, int]:
    """Return (node, driver, number of devices) of a ResourceSlice (DRA)."""
    node, driver = (raw.text(document, "spec", field) for field in ("nodeName", "driver"))
    return node, driver, len(list(raw.entries(document, "spec", "devices")))


def claim(document: Document) -> snapshot.ObservedClaim:
    size = raw.text(document, "status", "capacity", "storage")
    size = size or raw.text(document, "spec", "resources", "requests", "storage")
    if raw.text(document, "metadata", "annotations", names.SIZE_IS_NOMINAL) == "true":
        size = ""
    try:
        amount(size)
    except ValueError:
        size = ""
    return snapshot.ObservedClaim(
        name=raw.text(document, "metadata", "name"),
        kept_for=kept_for(document),
        maker=raw.text(document, "metadata", "labels", names.JOB_UID),
        size=size,
    )


def quota(document: Document) -> snapshot.ObservedQuota:
    """Return the state of the quota by Kueue's Workload; its message names any pending admission check."""
    evicted, reserved = raw.find_condition(document, "Evicted"), raw.find_condition(document, "QuotaReserved")
    is_evicted = evicted.get("status") == "True"
    message = raw.text(evicted if is_evicted else reserved, "message")
    for check in raw.entries(document, "status", "admissionChecks") if not is_evicted else ():
        if raw.text(check, "state") in ("Pending", "Retry"):  # such as a ProvisioningRequest, for nodes
            message = f"admission check {raw.text(check, 'name')} is pending: {raw.text(check, 'message')}".rstrip(": ")
    return snapshot.ObservedQuota(
        # A Workload whose RayJob has ended counts as reserved: it waits for no quota.
        reserved="True" in (reserved.get("status"), raw.find_condition(document, "Finished").get("status")),
        evicted=raw.text(evicted, "reason") if is_evicted else "",
        message=message,
    )
