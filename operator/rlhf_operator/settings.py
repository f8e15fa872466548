"""Settings of the installed operator: one YAML file, which the chart writes from its values."""

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rlhf_api import kubectl_yaml
from rlhf_api.checks.pod_template import PodRole, PodSpec, problems_of_templates
from rlhf_api.contract import LabelKey, LabelValue, Spec, Text
from rlhf_api.files import read_text
from rlhf_api.problems import SpecError
from rlhf_api.pydantic_errors import validated
from rlhf_api.spec.runtime import Cpus, Memory, ObjectName, PodTemplate, Runtime, Variable
from rlhf_mapper.hardware import Gpu, gpu_of_product
from rlhf_mapper.inventory import GigabitsPerSecond, GpuType, NodeFigures
from rlhf_operator.overlay import merged

AS_TEXT = BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value)
"""Validator that turns a number into text: YAML reads a quantity without a unit and quotes, such as 4, as a number."""


class Pod(Spec):
    """Default CPUs and memory of a pod, and a pod template over which a job's own template is laid."""

    cpu: Annotated[Cpus, AS_TEXT]
    memory: Annotated[Memory, AS_TEXT]
    template: PodTemplate = Field(default_factory=dict)


class ClaimDefaults(Spec):
    """Claim that is made for a job whose checkpoint.storage is no pvc://."""

    size: Annotated[Memory, AS_TEXT] = "50Gi"
    """Smallest size of the claim; a job whose checkpoints need more space gets a larger claim."""
    storage_class_name: str | None = None
    """Storage class of the claim; None: the cluster's default class."""
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"


class CaBundle(Spec):
    """Trusted certificate authorities: an entry of a ConfigMap that must exist in each namespace with jobs."""

    config_map: ObjectName
    key: Text


class ClusterGpu(GpuType):
    """GPU type that the mapper's table lacks, or for which this cluster has other figures."""

    product: Text
    """GPU product by a node's label (`names.gpu_product`), such as NVIDIA-A100-SXM4-80GB."""


class NodeTaint(Spec):
    """Taint of the nodes that a group adds."""

    key: LabelKey
    value: LabelValue = ""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


DEADLINE_SECONDS: Final = 1800


class NodesOfGroup(NodeFigures):
    """Group of the nodes that have all of `match_labels`: their links and price, and how many an autoscaler may run."""

    match_labels: dict[LabelKey, LabelValue]
    name: ObjectName | None = None
    """Name of the group in messages; needed with `max`."""
    least: Annotated[int, Field(ge=0, le=10_000, alias="min")] = 0
    """Number of nodes that the autoscaler adds even without waiting pods: pods are planned on these nodes first."""
    most: Annotated[int, Field(ge=0, le=10_000, alias="max")] = 0
    """Number of nodes up to which an autoscaler adds nodes for waiting pods; 0: it adds none."""
    gpu: Text | None = None
    """GPU product of a node, as its label will say (`names.gpu_product`); None: no GPUs."""
    gpus_per_node: Annotated[int, Field(ge=0, le=1024)] = 0
    cpu: Annotated[Cpus, AS_TEXT] | None = None
    """CPUs of a node for pods; None: enough for any pod."""
    memory: Annotated[Memory, AS_TEXT] | None = None
    """Memory of a node for pods; None: enough for any pod."""
    taints: Annotated[tuple[NodeTaint, ...], Field(strict=False)] = ()
    spot: bool = False
    """Whether the cloud may take its nodes back: pods of elastic pools prefer the group, others avoid it."""
    deadline_seconds: Annotated[int, Field(ge=1)] = DEADLINE_SECONDS
    """Seconds that the autoscaler may take to add nodes for an attempt."""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        """Refuse a growing group without name or labels, contradicting sizes, and only one of gpu and gpusPerNode."""
        if self.least > self.most > 0:
            raise ValueError("has a min above its max")
        if self.most and not (self.name and self.match_labels):
            raise ValueError("has max, so it needs name and matchLabels")
        if bool(self.gpu) != bool(self.gpus_per_node):
            raise ValueError("needs both gpu and gpusPerNode, or neither")
        return self


class Level(Spec):
    """Level of the network: zones of nodes by a label, and the Gb/s between two zones, all nodes together."""

    label: LabelKey
    gbps: GigabitsPerSecond


class Queue(Spec):
    """Rules of the line in which jobs wait for room."""

    namespace_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Weight by namespace, 1 if unset: in one priority, the namespace with the fewest held slots per weight is next."""


Peers = Annotated[tuple[dict[str, Any], ...], Field(strict=False)]
"""Type of a list of peers, as in a rule of a NetworkPolicy; only the API server checks the peers."""


class JobNetworkPolicy(Spec):
    """Peers that may connect to the pods of a job, besides these pods; an empty list admits nobody."""

    operator: Peers = ()
    """Peers that may read the progress of the training."""
    kube_ray: Peers = ()
    """Peers that may connect to Ray's dashboard; unless KubeRay is one, no job begins."""
    prometheus: Peers = ()
    """Peers that may read the metrics of the training and of Ray."""


class Settings(Spec):
    """Settings for all jobs; a job's spec.runtime and spec.checkpoint override them."""

    namespaces: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Namespaces that the operator watches; empty: all."""
    read_nodes: bool = True
    """Whether the operator may list nodes; if not, spec.resources alone determines the size of a job."""
    trainer_image: str = f"rlhf-trainer:{version('rlhf-operator')}"
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    image_pull_secrets: Annotated[tuple[ObjectName, ...], Field(strict=False, max_length=16)] = ()
    service_account_name: ObjectName | None = None
    env: Annotated[tuple[Variable, ...], Field(strict=False)] = ()
    """Variables of all jobs' containers; a job's own variable of the same name wins."""
    model_cache: dict[str, Any] | None = None
    """Source of a volume, as in a Pod, in which all jobs cache files of the hub; None: no cache."""
    ca_bundle: CaBundle | None = None
    ray_version: str = "2.60.0"
    gpu_resource_name: str = "nvidia.com/gpu"
    gpus: Annotated[tuple[ClusterGpu, ...], Field(strict=False)] = ()
    node_groups: Annotated[tuple[NodesOfGroup, ...], Field(strict=False)] = ()
    """Groups of nodes; the first entry whose labels a node has says the links and the price of the node."""
    topology: Annotated[tuple[Level, ...], Field(strict=False, max_length=1)] = ()
    """Levels of the network, the outermost first; at most one level so far."""
    queue: Queue = Queue()
    controller: Pod = Pod(cpu="4", memory="16Gi")
    worker: Pod = Pod(cpu="8", memory="64Gi")
    """Size of a worker pod with one slot; a pod with n slots has n times as much."""
    shared_memory: Annotated[Memory, AS_TEXT] = "16Gi"
    """Size of /dev/shm in a worker pod if the manifest sets none; at most half of the pod's memory."""
    grace_period_seconds: Annotated[int, Field(ge=30)] = 300
    """Seconds that pods may take to save a checkpoint and end once they are deleted."""
    storage: ClaimDefaults = ClaimDefaults()
    job_network_policy: JobNetworkPolicy | None = None
    """Peers of each job's pods; None: no NetworkPolicy is made for a job."""
    sandbox_dns: Peers = ()
    """Peers that sandboxes with `network: Egress` may use as DNS servers; an empty list admits none."""
    status_interval_seconds: Annotated[float, Field(gt=0)] = 15.0
    """Seconds between two readings of a running job's progress."""
    lease_name: str = "rlhf-operator"
    lease_namespace: str | None = None
    """Namespace of the Lease; None: no election, because the only replica leads."""

    @field_validator("gpus")
    @classmethod
    def _names_are_of_one_type(cls, gpus: tuple[ClusterGpu, ...]) -> tuple[ClusterGpu, ...]:
        """Refuse GPU types of one name with different figures: pods may go to all nodes with GPUs of that name."""
        types = {each.gpu("") for each in gpus}
        if len(types) > len({each.name for each in gpus}):
            raise ValueError("has one name for GPUs with different figures")
        return gpus

    @model_validator(mode="after")
    def _groups_are_right(self) -> Self:
        """Refuse growing groups with equal names, and growing groups whose labels name no zone of the topology."""
        growing = [each for each in self.node_groups if each.most]
        if len({each.name for each in growing}) < len(growing):
            raise ValueError("nodeGroups has two entries with max and the same name")
        for level in self.topology:
            if lacking := next((each.name for each in growing if level.label not in each.match_labels), None):
                raise ValueError(f"nodeGroups: {lacking} needs {level.label} in matchLabels, as topology names it")
        return self

    @model_validator(mode="after")
    def _templates_are_right(self) -> Self:
        if found := problems_of_templates({"controller": self.controller.template, "worker": self.worker.template}):
            raise SpecError(found)
        return self

    def runtime_of(self, runtime: Runtime) -> Runtime:
        """Return a job's runtime; unset pull secrets, account and variables are those of the installation."""
        named = {each.name for each in runtime.env}
        return runtime.model_copy(
            update={
                "image_pull_secrets": runtime.image_pull_secrets or self.image_pull_secrets,
                "service_account_name": runtime.service_account_name or self.service_account_name,
                "env": (*(each for each in self.env if each.name not in named), *runtime.env),
            }
        )

    def template_of(self, runtime: Runtime, role: PodRole) -> dict[str, Any]:
        """Return the pod template of a role: the installation's template with the job's template laid over it."""
        ours, own = (self.worker, runtime.worker) if role == "worker" else (self.controller, runtime.controller)
        template: dict[str, Any] = merged(ours.template, own.template or {})
        return template

    def pod_of(self, runtime: Runtime, role: PodRole) -> PodSpec:
        """Return the parsed pod spec of a role, from the merged template of installation and job."""
        return PodSpec.model_validate(self.template_of(runtime, role).get("spec", {}), by_alias=True, by_name=False)

    def gpu_resource_of(self, runtime: Runtime) -> str:
        """Return the name of the Kubernetes resource of a job's GPUs."""
        return runtime.gpu_resource_name or self.gpu_resource_name

    def gpu_of(self, product: str) -> Gpu | None:
        """Return the figures of a GPU product: from these settings, else from the mapper's table; None if unknown."""
        found = (each.gpu("the operator's settings") for each in self.gpus if each.product == product)
        return next(found, None) or gpu_of_product(product)

    def node_figures(self, labels: Mapping[str, str]) -> NodeFigures:
        """Return the figures of links and price for a node with these labels; empty if unset."""
        found = (each for each in self.node_groups if each.match_labels.items() <= labels.items())
        return next(found, NodeFigures())

    def group(self, name: str) -> NodesOfGroup | None:
        """Return the node group of this name to which an autoscaler adds nodes; None if there is none."""
        return next((each for each in self.node_groups if each.most and each.name == name), None)

    def seconds_to_add(self, groups: Iterable[str], otherwise: float) -> float:
        """Return the seconds that the slowest of these groups may take to add nodes; `otherwise` without groups.

        A group that the settings do not name has the default of `deadlineSeconds`.
        """
        known = {each.name: each.deadline_seconds for each in self.node_groups}
        return max((float(known.get(each, DEADLINE_SECONDS)) for each in groups), default=otherwise)

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read the settings from a file. Raises SpecError with every mistake."""
        return validated(cls, kubectl_yaml.read_one(read_text(file), f"{file}: ") or {}, f"{file}: ")
