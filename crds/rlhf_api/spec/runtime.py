"""Pods of a job: image, environment and sizes, which only the operator reads, and sandboxes."""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue

from rlhf_api.contract import (
    CPUS,
    DNS_SUBDOMAIN,
    IMAGE,
    QUANTITY,
    SECRET_KEY,
    WHOLE,
    Count,
    Identifier,
    LabelKey,
    Listed,
    Spec,
)
from rlhf_api.expressions import VALUE, Check
from rlhf_api.spec.functions import check_depth

SOME_CPUS = Check(VALUE.quantity_minus("0") > 0, 'is "{value}", expected more than 0')
SOME_MEMORY = Check(
    VALUE.quantity_minus("1Mi") >= 0, 'is "{value}", expected at least 1Mi; a number without a unit is bytes'
)
PodTemplate = Annotated[dict[Identifier, JsonValue], BeforeValidator(check_depth)]
Cpus = Annotated[str, Field(pattern=CPUS, max_length=32), SOME_CPUS]
Memory = Annotated[str, Field(pattern=QUANTITY, max_length=32), SOME_MEMORY]
ObjectName = Annotated[str, Field(pattern=DNS_SUBDOMAIN, max_length=253)]


class SecretKey(Spec):
    """An entry of a Secret of the job's namespace."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: str = Field(pattern=SECRET_KEY, max_length=253, description="Key in the Secret.")


class Variable(Spec):
    """An environment variable of all pods: a value, or an entry of a Secret."""

    hints: ClassVar = {"valueFrom": "write secret: {name: ..., key: ...}"}

    name: Identifier = Field(description="Name, such as NCCL_DEBUG or HF_TOKEN.")
    value: str | None = Field(None, max_length=8192, description="Value of the variable; give this or secret.")
    secret: SecretKey | None = Field(None, description="Entry of a Secret with the value; the operator never reads it.")


class PodSize(Spec):
    """A pod: CPUs and memory, as request and limit, and a pod template with its other fields."""

    hints: ClassVar = dict.fromkeys(("gpu", "gpus"), "spec.resources.slotsPerNode says how many GPUs a worker gets")

    cpu: Cpus | None = Field(None, description="CPUs of the pod; unset is the operator's default.")
    memory: Memory | None = Field(None, description="Memory of the pod; unset is the operator's default.")
    template: PodTemplate | None = None
    """metadata (labels, annotations) and spec of the pod, as Kubernetes has them. They override the operator's; lists
    such as containers are merged by name. Ray's container is ray-head or ray-worker.
    """


class Runtime(Spec):
    """The pods of a job; unset fields have the operator's defaults."""

    hints: ClassVar = {
        "resources": "CPUs and memory are runtime.worker, GPUs are spec.resources.slotsPerNode",
        **{
            field: f"write worker: {{template: {{spec: {{{field}: ...}}}}}}"
            for field in ("affinity", "hostNetwork", "nodeSelector", "priorityClassName", "tolerations", "volumes")
        },
    }

    image: str | None = Field(None, pattern=IMAGE, min_length=1, max_length=1024, description="Image of the trainer.")
    image_pull_secrets: Listed[ObjectName] = Field((), max_length=16)
    """Secrets for the registry of the image."""
    service_account_name: ObjectName | None = None
    """Service account of the pods; they get no token of it."""
    env: Listed[Variable] = Field((), max_length=128, description="Environment variables of all pods.")
    gpu_resource_name: LabelKey | None = None
    """Name of the GPU resource in Kubernetes; unset is nvidia.com/gpu."""
    shared_memory: Memory | None = Field(None, description="Size of /dev/shm in a worker pod.")
    controller: PodSize = Field(PodSize(), description="Size and template of the head pod, which runs the controller.")
    worker: PodSize = Field(PodSize(), description="Size and template of each worker pod.")


class Sandbox(Spec):
    """Pods in which code of the model runs on a cluster: each serves one response or episode, and is replaced."""

    image: str | None = Field(None, pattern=IMAGE, min_length=1, max_length=1024)
    """Image with python3, 3.11 or newer, for the verifier Code with pytest, too. Unset is the trainer's."""
    cpu: Cpus = Field("1", description="CPUs of a pod.")
    memory: Memory = Field("2Gi", description="Memory of a pod. Half of it holds its files.")
    network: Literal["None", "Egress"] = "None"
    """Network of the code. Egress: addresses outside of private networks, and the cluster's DNS."""
    warm: Annotated[int, Field(ge=1, le=1000), WHOLE] = 8
    """Number of pods. More responses and episodes at a time wait for one."""
    seconds: Count = Field(600, description="Longest time of a response or episode.")
