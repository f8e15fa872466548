"""Parts that the pods of a job share: image, environment variables, volumes, and the preStop hook of Ray's pods."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Final

from rlhf_api.checks.pod_template import PodRole
from rlhf_api.job import Job
from rlhf_api.quantities import amount, mebibytes
from rlhf_api.status import MappedPlacement, MappedPool
from rlhf_operator import names
from rlhf_operator.overlay import avoid_nodes, merged
from rlhf_operator.resources import identity, storage
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Snapshot

SCRATCH = "/tmp"
"""Folder in which everybody may write; Ray keeps its session and its logs there."""
SHARED_MEMORY = "/dev/shm"
CA_FOLDER: Final = "/rlhf/ca"
CA_FILE: Final = "ca.crt"
MODELS_FOLDER: Final = "/rlhf/models"
CA_VOLUME, MODELS_VOLUME = "rlhf-ca", "rlhf-models"
END_SECONDS = 15
"""Seconds of the grace period that processes have left to end after save-now."""
IF_OTHERS_SAVE: Final = (
    f"for _ in $(seq 10); do [ ! -e {names.OUTPUT_FOLDER}/save-now ] || break; sleep 1; done; "
    f"[ ! -e {names.OUTPUT_FOLDER}/save-now ] || "
)
"""Shell prefix of the save command in an elastic pool's pod: it saves only if another pod requests that within 10 s."""


@dataclass(frozen=True, kw_only=True)
class AttemptPods:
    """Values from which the pod templates and manifests of an attempt are made."""

    snapshot: Snapshot
    job: Job
    mapping: MappedPlacement
    settings: Settings
    attempt: int = 1
    avoided: Sequence[str] = ()
    """Names of nodes that the attempt's pods must not use; a coming node stands for its group."""
    config_map: str = ""
    """Name of the ConfigMap with job.yaml."""

    @property
    def gpu_resource(self) -> str:
        """Name of the Kubernetes resource of this job's GPUs."""
        return self.settings.gpu_resource_of(self.job.spec.runtime)

    @cached_property
    def mounts(self) -> tuple[storage.Mount, ...]:
        """Mounts of all claims in the attempt's pods."""
        return storage.mounts(self.job, self.snapshot.inputs)

    def template(self, role: PodRole, pod: Mapping[str, Any], *, pool: MappedPool | None = None) -> dict[str, Any]:
        """Return a pod template of a role; `pod` holds the fields that differ between head and workers."""
        labels = identity.labels(self.snapshot.job, self.attempt) | {names.ROLE: role}
        ours = {
            "metadata": {
                "labels": labels | ({names.POOL: pool.name} if pool else {}),
                "annotations": identity.fixed_part(
                    "left_to_autoscalers" if pool and pool.max_nodes else "kept_by_autoscalers"
                ),
            },
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": self.settings.grace_period_seconds,
                **identity.pod_security(self.settings.runtime_of(self.job.spec.runtime)),
                **storage.make_run_folder(self.mounts, image_of(self.job, self.settings)),
                **pod,
            },
        }
        own = merged(ours, self.settings.template_of(self.job.spec.runtime, role))
        avoided = [each for each in self.avoided if not names.group_of(each)]
        template: dict[str, Any] = merged(own, {"spec": avoid_nodes(avoided)})
        return template

    def container(
        self, name: str, resources: Mapping[str, str], variables: Mapping[str, str], *, leaves_early: bool = False
    ) -> dict[str, Any]:
        """Return the container in which Ray runs; KubeRay sets its command and its probes."""
        # Time for a checkpoint, before the kubelet kills the rest; by default Ray kills the trainer three seconds
        # after asking it to stop.
        saving_seconds = str(max(1, self.settings.grace_period_seconds - END_SECONDS))
        keep_logs = f"timeout {END_SECONDS} python -m rlhf_trainer.pods.ray_logs {names.OUTPUT_FOLDER}"
        save = f"{IF_OTHERS_SAVE if leaves_early else ''}timeout {saving_seconds} rlhf save-now {names.OUTPUT_FOLDER}"
        return {
            "name": name,
            **image_of(self.job, self.settings),
            "env": self.environment({"RAY_JOB_STOP_WAIT_TIME_S": saving_seconds, **variables}),
            "resources": {"requests": dict(resources), "limits": dict(resources)},
            "securityContext": identity.fixed_part("container_security"),
            "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", f"{keep_logs} & {save}; wait"]}}},
            "volumeMounts": [
                {"name": "scratch", "mountPath": SCRATCH},
                {"name": "shared-memory", "mountPath": SHARED_MEMORY},
                {"name": "job", "mountPath": names.JOB_FOLDER, "readOnly": True},
                *installed_mounts(self.settings),
                *storage.volume_mounts(self.mounts),
            ],
        }

    def volumes(self, shared_memory: str) -> list[dict[str, Any]]:
        """Return the volumes of a pod with one Ray container."""
        return [
            {"name": "scratch", "emptyDir": {}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}},
            {"name": "job", "configMap": {"name": self.config_map}},
            *installed_volumes(self.settings),
            *storage.volumes(self.mounts),
        ]

    def environment(self, ours: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return a container's environment variables: `ours`, attempt number, job uid and those of all containers."""
        whose = {"RLHF_ATTEMPT": str(self.attempt), "RLHF_JOB_UID": self.snapshot.job.uid}
        if self.job.spec.sandbox:
            rayjob = names.rayjob_name(self.job.name, self.attempt)
            service = f"{names.sandboxes_name(rayjob)}.{self.snapshot.job.namespace}.svc"
            whose["RLHF_SANDBOXES"] = f"{service}:{names.SANDBOX_PORT}"
        return environment(self.job, self.settings, {**whose, **ours})


def image_of(job: Job, settings: Settings) -> dict[str, str]:
    """Return image and pull policy of every container of a job."""
    return {"image": job.spec.runtime.image or settings.trainer_image, "imagePullPolicy": settings.image_pull_policy}


def environment(job: Job, settings: Settings, ours: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a container's environment variables; installation and user override `ours` of the same name."""
    users: dict[str, dict[str, Any]] = {}
    for variable in settings.runtime_of(job.spec.runtime).env:
        secret = variable.secret
        value = {"valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}} if secret else {}
        users[variable.name] = {"name": variable.name, **(value or {"value": variable.value or ""})}
    authorities = f"{CA_FOLDER}/{CA_FILE}"
    always = {
        "HOME": SCRATCH,
        "RLHF_IMAGE": image_of(job, settings)["image"],
        **identity.fixed_part("environment"),
        # In the run folder, so that an attempt finds what an earlier one compiled for minutes.
        "VLLM_CACHE_ROOT": f"{names.OUTPUT_FOLDER}/.cache/vllm",
        **(dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), authorities) if settings.ca_bundle else {}),
        **({"HF_HUB_CACHE": MODELS_FOLDER} if settings.model_cache else {}),
    }
    return [
        *({"name": name, "value": value} for name, value in {**always, **ours}.items() if name not in users),
        *users.values(),
    ]


def shared_memory(requested: str, memory: str, *, share: Fraction) -> str:
    """Return the size of /dev/shm: as requested, but at most a share of the pod's memory, against which it counts."""
    return mebibytes(min(amount(requested), amount(memory) * share))


def object_store(shared: str) -> str:
    """Return the bytes of Ray's object store: half of /dev/shm, which collectives and data loaders use too."""
    return str(max(int(amount(shared) / 2), 80 * 1024**2))  # Ray refuses less than 75 MiB


def installed_volumes(settings: Settings) -> list[dict[str, Any]]:
    """Return the volumes of a pod for the certificate authorities and the model cache."""
    found: list[dict[str, Any]] = []
    if bundle := settings.ca_bundle:
        items = [{"key": bundle.key, "path": CA_FILE}]
        found.append({"name": CA_VOLUME, "configMap": {"name": bundle.config_map, "items": items}})
    if settings.model_cache:
        found.append({"name": MODELS_VOLUME, **settings.model_cache})
    return found


def installed_mounts(settings: Settings) -> list[dict[str, Any]]:
    """Return the mounts of a container for the certificate authorities and the model cache."""
    ca = [{"name": CA_VOLUME, "mountPath": CA_FOLDER, "readOnly": True}] if settings.ca_bundle else []
    return [*ca, *([{"name": MODELS_VOLUME, "mountPath": MODELS_FOLDER}] if settings.model_cache else [])]
