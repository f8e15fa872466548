"""Claims of a job, their mounts in its pods, and the URIs of files in the claims."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self
from urllib.parse import quote

from rlhf_api.chain import SCHEME
from rlhf_api.job import Job
from rlhf_api.quantities import amount
from rlhf_operator import names
from rlhf_operator.actions import Manifest
from rlhf_operator.resources import identity
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import ObservedJob, claims_named, inputs_of

PVC = "pvc://"
MAKE_FOLDER = """
umask "$(printf %o $((0777 & ~0$(stat -c %a "$1"))))"
said=$(mkdir -p "$1/$2" 2>&1) && said=$(stat -c 'owner %u:%g, mode %a' "$1/$2") && test -w "$1/$2" && exit
echo "spec.checkpoint.storage: user $(id -u):$(id -g) may not write to folder $2 of claim $3 ($said);" \
    "give the folder to this user, or the claim a volume that follows fsGroup"
exit 1
"""
"""Shell script that makes a folder ($2) of a claim ($3) mounted at $1, with the permissions of the claim's root.

The kubelet would make the folder of a subPath as root, if it may at all (NFS with root_squash).
"""


class Place(NamedTuple):
    """Folder in a PersistentVolumeClaim."""

    claim: str
    path: str
    """Path of the folder in the claim; empty for the whole claim."""

    @classmethod
    def of(cls, uri: str) -> Self:
        """Parse a URI pvc://claim/path."""
        claim, _, path = uri.removeprefix(PVC).partition("/")
        return cls(claim=claim, path="/".join(part for part in path.split("/") if part not in ("", ".", "..")))

    def below(self, *parts: str) -> str:
        """Return the URI pvc://claim/path of a folder or file below this folder of a claim."""
        return PVC + "/".join(part for part in (self.claim, self.path, *parts) if part)


class Mount(NamedTuple):
    """Mount of a folder of a claim in a pod."""

    place: Place
    folder: str
    read_only: bool


def run_folder(job: Job) -> Place:
    """Return the folder for a job's runs: in the claim that its storage names, or in a claim made for the job.

    Each job has its own folder, because jobs may share a claim and a run folder is for one run at a time.
    """
    storage = job.spec.checkpoint.storage
    if storage and storage.startswith(PVC):
        return Place.of(Place.of(storage).below(job.name))
    return Place(claim=names.output_claim_name(job.name), path="")


def output_uri(job: Job) -> str:
    """Return the URI of the model, or of the data set, that the job will have made when it has succeeded."""
    return run_folder(job).below(job.name, job.spec.algorithm.makes)


def of_checkpoints(job: Job) -> str | None:
    """Return the URI of a bucket's folder for checkpoints, as the trainer gets it; None if they go to the run folder.

    The URI has the namespace, because jobs of several namespaces may have one name and share a bucket.
    """
    storage = job.spec.checkpoint.storage
    if storage is None or storage.startswith(PVC):
        return None
    return f"{storage.rstrip('/')}/{job.metadata.namespace}"


def mounts(job: Job, inputs: Mapping[str, ObservedJob]) -> tuple[Mount, ...]:
    """Return the mounts of all claims in a job's pods."""
    # The claim of the checkpoint is mounted as the run folder; no default names a claim or a job.
    spec = job.spec.model_dump(exclude={"checkpoint", "runtime"}, exclude_defaults=True)
    read = [(f"{names.INPUTS_FOLDER}/{name}", Place.of(inputs[name].output_uri).claim) for name in inputs_of(spec)]
    read += [(f"{names.CLAIMS_FOLDER}/{claim}", claim) for claim in claims_named(spec)]
    return (
        Mount(place=run_folder(job), folder=names.OUTPUT_FOLDER, read_only=False),
        *(Mount(place=Place(claim=claim, path=""), folder=folder, read_only=True) for folder, claim in sorted(read)),
    )


def make_run_folder(mounted: tuple[Mount, ...], image: Mapping[str, str]) -> dict[str, Any]:
    """Return the pod field with the container that makes the run folder; {} if the run folder is a whole claim.

    Only this container mounts the whole claim: the others mount the folder. image: of the job's containers.
    """
    place = next(each.place for each in mounted if each.folder == names.OUTPUT_FOLDER)
    container = {
        "name": names.FOLDER_CONTAINER,
        **image,
        "command": ["sh", "-c", MAKE_FOLDER, "sh", names.WHOLE_CLAIM, place.path, place.claim],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "500m", "memory": "256Mi"}},
        "securityContext": identity.fixed_part("container_security"),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": _volumes(mounted)[place.claim], "mountPath": names.WHOLE_CLAIM}],
    }
    return {"initContainers": [container]} if place.path else {}


def volumes(mounted: tuple[Mount, ...]) -> list[dict[str, Any]]:
    """Return the volumes of a pod, one for each claim."""
    named = _volumes(mounted).items()
    return [{"name": volume, "persistentVolumeClaim": {"claimName": claim}} for claim, volume in named]


def volume_mounts(mounted: tuple[Mount, ...]) -> list[dict[str, Any]]:
    """Return the volume mounts of a container, one for each mount of a claim."""
    return [
        {
            "name": _volumes(mounted)[mount.place.claim],
            "mountPath": mount.folder,
            **({"subPath": mount.place.path} if mount.place.path else {}),
            **({"readOnly": True} if mount.read_only else {}),
        }
        for mount in mounted
    ]


def in_pod(uri: str, inputs: Mapping[str, ObservedJob]) -> str:
    """Return a URI as the trainer in a pod gets it: job:// and pvc:// become file:// of a mounted folder."""
    if uri.startswith(SCHEME):
        name = uri.removeprefix(SCHEME)
        return _file(f"{names.INPUTS_FOLDER}/{name}", Place.of(inputs[name].output_uri))
    if uri.startswith(PVC):
        place = Place.of(uri)
        return _file(f"{names.CLAIMS_FOLDER}/{place.claim}", place)
    return uri


def has_own_claim(job: Job) -> bool:
    """Whether the operator makes a claim for the job, because the job's storage names none."""
    return not (job.spec.checkpoint.storage or "").startswith(PVC)


def goes_with(job: Job, *, has_succeeded: bool) -> bool:
    """Whether the claim that the operator made for a job is deleted with the job."""
    retain = job.spec.storage.retain
    return retain == "Never" or (retain == "OnFailure" and has_succeeded)


def output_claim(seen: ObservedJob, job: Job, settings: Settings, *, at_least: str) -> Manifest:
    """Return the claim that is made for a job whose storage names none. at_least: its smallest size."""
    storage = settings.storage
    size = max(storage.size, at_least, key=amount)
    spec: dict[str, Any] = {"accessModes": [storage.access_mode], "resources": {"requests": {"storage": size}}}
    if storage.storage_class_name is not None:
        spec["storageClassName"] = storage.storage_class_name
    owners = [identity.owner(seen)] if goes_with(job, has_succeeded=False) else []
    metadata = {**identity.metadata(seen, names.output_claim_name(job.name)), "ownerReferences": owners}
    return identity.document("v1", "PersistentVolumeClaim", metadata, spec=spec)


def _file(folder: str, place: Place) -> str:
    return f"file://{folder}/{quote(place.path)}".rstrip("/")


def _volumes(mounted: tuple[Mount, ...]) -> dict[str, str]:
    """Return the names of volumes in the pod, by claim: they have an index, because names of claims may be too long."""
    claims = dict.fromkeys(mount.place.claim for mount in mounted)
    return {claim: f"claim-{index}" for index, claim in enumerate(claims)}
