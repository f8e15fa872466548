"""How the operator was installed: one YAML file, which the chart writes from its values."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from rlhf_api import kubectl_yaml
from rlhf_api.checks.pod_template import PodRole, PodSpec, template_problems
from rlhf_api.contract import LabelKey, LabelValue, Spec, Text
from rlhf_api.problems import Problem, SpecError
from rlhf_api.pydantic_errors import explain
from rlhf_api.spec.runtime import Cpus, Memory, ObjectName, PodTemplate, Runtime, Variable
from rlhf_mapper.hardware import Gpu, gpu_of_product
from rlhf_mapper.inventory import GigabitsPerSecond, GpuType, NodeFigures
from rlhf_operator.overlay import merged


class Pod(Spec):
    """CPUs and memory of a pod that does not say, and a template that a job's own is laid over."""

    cpu: Cpus
    memory: Memory
    template: PodTemplate = Field(default_factory=dict)


class Storage(Spec):
    """The claim that is made for a job whose checkpoint.storage is no pvc://."""

    size: Memory = "50Gi"
    """At least; a job whose checkpoints need more gets more."""
    storage_class_name: str | None = None
    """Unset is the cluster's default class."""
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"


class CaBundle(Spec):
    """An entry of a ConfigMap that each namespace with jobs has: the authorities whose certificates are trusted."""

    config_map: ObjectName
    key: Text


class ClusterGpu(GpuType):
    """A type of GPU that the mapper's table lacks, or has other figures for."""

    product: Text
    """Product label of a node with such GPUs: NVIDIA-A100-SXM4-80GB."""


class LabelledNodes(NodeFigures):
    """Links and prices of the nodes with some labels."""

    match_labels: dict[LabelKey, LabelValue]


class Level(Spec):
    """Zones of nodes, by the value of a label, and what each sends each other, all its nodes together."""

    label: LabelKey
    gbps: GigabitsPerSecond


Peers = Annotated[tuple[dict[str, Any], ...], Field(strict=False)]
"""Peers as in a NetworkPolicy; the API server checks them."""


class JobNetworkPolicy(Spec):
    """Who may connect to the pods of a job besides themselves; where there are no peers, nobody."""

    operator: Peers = ()
    """To the progress of the training."""
    kube_ray: Peers = ()
    """To Ray's dashboard: without it no job begins."""
    prometheus: Peers = ()
    """To the metrics of the training and of Ray."""


class Settings(Spec):
    """Settings for all jobs; a job's spec.runtime and spec.checkpoint override them."""

    namespaces: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """To watch; none means all."""
    read_nodes: bool = True
    """Whether the operator may list nodes; without, spec.resources alone sizes a job."""
    trainer_image: str = f"rlhf-trainer:{version('rlhf-operator')}"
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    image_pull_secrets: Annotated[tuple[ObjectName, ...], Field(strict=False)] = ()
    service_account_name: ObjectName | None = None
    env: Annotated[tuple[Variable, ...], Field(strict=False)] = ()
    """Besides a job's own, which come first where both name one."""
    model_cache: dict[str, Any] | None = None
    """Source of a volume, as in a Pod, in which all jobs cache files of the hub."""
    ca_bundle: CaBundle | None = None
    ray_version: str = "2.60.0"
    gpu_resource_name: str = "nvidia.com/gpu"
    gpus: Annotated[tuple[ClusterGpu, ...], Field(strict=False)] = ()
    node_groups: Annotated[tuple[LabelledNodes, ...], Field(strict=False)] = ()
    """The first whose labels a node has holds for it."""
    topology: Annotated[tuple[Level, ...], Field(strict=False, max_length=1)] = ()
    """Outermost first; one level so far."""
    controller: Pod = Pod(cpu="4", memory="16Gi")
    worker: Pod = Pod(cpu="8", memory="64Gi")
    """Size of a worker pod with one slot; a pod with n slots has n times as much."""
    shared_memory: Memory = "16Gi"
    """/dev/shm of a worker."""
    grace_period_seconds: Annotated[int, Field(ge=30)] = 300
    """How long pods may take to save a checkpoint when they are told to end."""
    storage: Storage = Storage()
    job_network_policy: JobNetworkPolicy | None = None
    """None: no NetworkPolicy is made for a job."""
    status_interval_seconds: Annotated[float, Field(gt=0)] = 15.0
    """Between two readings of a running job's progress."""
    lease_name: str = "rlhf-operator"
    lease_namespace: str | None = None
    """None: no election; the only replica leads."""

    @field_validator("gpus")
    @classmethod
    def _names_are_of_one_type(cls, gpus: tuple[ClusterGpu, ...]) -> tuple[ClusterGpu, ...]:
        """Several products may have one name, but not with different figures: pods are bound to the name's nodes."""
        types = {each.gpu("") for each in gpus}
        if len(types) > len({each.name for each in gpus}):
            raise ValueError("has one name for GPUs with different figures")
        return gpus

    @model_validator(mode="after")
    def _templates_are_right(self) -> Self:
        pods: tuple[tuple[PodRole, Pod], ...] = (("controller", self.controller), ("worker", self.worker))
        found = [
            each.within(f"{role}.template.") for role, pod in pods for each in template_problems(pod.template, role)
        ]
        if found:
            raise SpecError(found)
        return self

    def runtime_of(self, runtime: Runtime) -> Runtime:
        """The runtime of a job with what it does not say of registry, account and variables."""
        named = {each.name for each in runtime.env}
        return runtime.model_copy(
            update={
                "image_pull_secrets": runtime.image_pull_secrets or self.image_pull_secrets,
                "service_account_name": runtime.service_account_name or self.service_account_name,
                "env": (*(each for each in self.env if each.name not in named), *runtime.env),
            }
        )

    def template_of(self, runtime: Runtime, role: PodRole) -> dict[str, Any]:
        """Pod template of a role: the installation's template with the job's template laid over it."""
        ours, own = (self.worker, runtime.worker) if role == "worker" else (self.controller, runtime.controller)
        template: dict[str, Any] = merged(ours.template, own.template or {})
        return template

    def pod_of(self, runtime: Runtime, role: PodRole) -> PodSpec:
        """Parsed spec of that template."""
        return PodSpec.model_validate(self.template_of(runtime, role).get("spec", {}), by_alias=True, by_name=False)

    def gpu_resource_of(self, runtime: Runtime) -> str:
        """Kubernetes resource of a job's GPUs."""
        return runtime.gpu_resource_name or self.gpu_resource_name

    def gpu_of(self, product: str) -> Gpu | None:
        """The figures of a product, as nodes name it: these settings' own, else those of the mapper's table."""
        for each in self.gpus:
            if each.product == product:
                return each.gpu("the operator's settings")
        return gpu_of_product(product)

    def zone_of(self, labels: Mapping[str, str]) -> str:
        """Zone of a node with these labels; empty if unknown."""
        return next((labels.get(level.label, "") for level in self.topology), "")

    def node_figures(self, labels: Mapping[str, str]) -> NodeFigures:
        """Figures of links and price for a node with these labels."""
        found = (each for each in self.node_groups if each.match_labels.items() <= labels.items())
        return next(found, NodeFigures())

    @classmethod
    def read(cls, file: Path) -> Self:
        """The settings in a file. SpecError with every mistake."""
        try:
            documents = kubectl_yaml.read(file.read_text(), f"{file}: ")
        except OSError as error:
            raise SpecError([Problem(str(file), f"cannot be read: {error.strerror}")]) from None
        try:
            return cls.model_validate(documents[0] if documents else {}, by_alias=True, by_name=False)
        except ValidationError as found:
            raise SpecError([each.within(f"{file}: ") for each in explain(cls, found).problems]) from None
