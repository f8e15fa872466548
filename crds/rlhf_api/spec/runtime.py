"""Pods of a job: image, environment and sizes; only the operator reads them."""

from types import MappingProxyType
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, JsonValue

from rlhf_api.contract import (
    CPUS,
    DNS_SUBDOMAIN,
    IMAGE,
    QUANTITY,
    SECRET_KEY,
    Identifier,
    LabelKey,
    Spec,
    check_depth,
)
from rlhf_api.expressions import VALUE, Check

SOME_CPUS = Check(VALUE.quantity_minus("0") > 0, 'is "{value}", expected more than 0')
SOME_MEMORY = Check(
    VALUE.quantity_minus("1Mi") >= 0, 'is "{value}", expected at least 1Mi; a number without a unit is bytes'
)
PodTemplate = Annotated[dict[Identifier, JsonValue], BeforeValidator(check_depth)]
Quantity = Annotated[str, Field(pattern=QUANTITY, max_length=32)]
Cpus = Annotated[str, Field(pattern=CPUS, max_length=32), SOME_CPUS]
Memory = Annotated[Quantity, SOME_MEMORY]
ObjectName = Annotated[str, Field(pattern=DNS_SUBDOMAIN, max_length=253)]


class SecretKey(Spec):
    """An entry of a Secret of the job's namespace."""

    name: Annotated[ObjectName, Field(description="Name of the Secret.")]
    key: Annotated[str, Field(pattern=SECRET_KEY, max_length=253, description="Key in it.")]


class Variable(Spec):
    """An environment variable of all pods: a value, or an entry of a Secret."""

    hints: ClassVar = MappingProxyType({"valueFrom": "write secret: {name: ..., key: ...}"})

    name: Annotated[Identifier, Field(description="Name, such as NCCL_DEBUG or HF_TOKEN.")]
    value: Annotated[str | None, Field(max_length=8192, description="Its value; or give secret.")] = None
    secret: Annotated[SecretKey | None, Field(description="Where its value is; the operator never reads it.")] = None


class PodSize(Spec):
    """A pod: CPUs and memory, as request and limit, and what else Kubernetes may be told of it."""

    hints: ClassVar = MappingProxyType(
        dict.fromkeys(("gpu", "gpus"), "spec.resources.slotsPerNode says how many GPUs a worker gets")
    )

    cpu: Annotated[Cpus | None, Field(description="CPUs; unset is the operator's default.")] = None
    memory: Annotated[Memory | None, Field(description="Memory; unset is the operator's default.")] = None
    template: Annotated[
        PodTemplate | None,
        Field(
            description="metadata (labels, annotations) and spec of the pod, as Kubernetes has them; laid over the "
            "operator's, containers and the like merged by name. Ray's container is ray-head or ray-worker."
        ),
    ] = None


class Runtime(Spec):
    """The pods of a job; what is unset is the operator's default."""

    hints: ClassVar = MappingProxyType(
        {
            "resources": "CPUs and memory are runtime.worker, GPUs are spec.resources.slotsPerNode",
            **{
                field: f"write worker: {{template: {{spec: {{{field}: ...}}}}}}"
                for field in ("affinity", "hostNetwork", "nodeSelector", "priorityClassName", "tolerations", "volumes")
            },
        }
    )

    image: Annotated[
        str | None, Field(pattern=IMAGE, min_length=1, max_length=1024, description="Image of the trainer.")
    ] = None
    image_pull_secrets: Annotated[
        tuple[ObjectName, ...], Field(strict=False, max_length=16, description="Secrets for the registry of the image.")
    ] = ()
    service_account_name: Annotated[
        ObjectName | None, Field(description="Service account of the pods; they get no token of it.")
    ] = None
    env: Annotated[
        tuple[Variable, ...], Field(strict=False, max_length=128, description="Environment variables of all pods.")
    ] = ()
    gpu_resource_name: Annotated[
        LabelKey | None, Field(description="What Kubernetes calls a GPU; unset is nvidia.com/gpu.")
    ] = None
    shared_memory: Annotated[Memory | None, Field(description="Size of /dev/shm of a worker.")] = None
    controller: Annotated[PodSize, Field(description="The head pod, in which the controller runs.")] = PodSize()
    worker: Annotated[PodSize, Field(description="Each worker pod.")] = PodSize()
