"""Pod templates that are merged into the operator's pods: allowed fields, and fields that the operator reads."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from pydantic import ConfigDict, Field

from rlhf_api.contract import LabelKey, Labels, Listed, Spec
from rlhf_api.problems import Problem, SpecError
from rlhf_api.pydantic_errors import validated
from rlhf_api.tables import read_table

PodRole = Literal["controller", "worker"]
CONTAINERS: Final[Mapping[PodRole, tuple[str, ...]]] = {
    "controller": ("ray-head", "driver-log"),
    "worker": ("ray-worker",),
}
"""Kind of pod -> names of the containers that the operator puts into it; Ray's container comes first."""
KEYS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "env", "resourceClaims", "claims"), "name"),
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
}
"""List field -> key by which its entries are merged. Other lists of objects are joined; plain lists are replaced."""
OWN = "is the operator's"
REFUSED_FIELDS = read_table(__package__, "refused_fields.yaml", dict[Literal["pod", "own_container"], dict[str, str]])
"""Fields that a pod template cannot set, of the pod and of the operator's own containers -> why, for the message."""
OWN_VOLUME = re.compile(r"scratch|shared-memory|job|claim-\d+|rlhf-(ca|models)")
OWN_FOLDER = re.compile(r"/tmp/?|/dev/shm/?|/rlhf(/.*)?")
OWN_LABEL = re.compile(r"(rlhf\.hybridflow\.io|ray\.io|kueue\.x-k8s\.io)/.*|app\.kubernetes\.io/managed-by")
OWN_VARIABLE = re.compile("RLHF_.*")
OWN_RESOURCE = re.compile(r"cpu|memory|.*/gpu|nvidia\.com/mig-.*")


class Part(Spec):
    """Base of the parts of a pod template: the operator reads the fields of the class, Kubernetes gets all fields."""

    model_config = ConfigDict(extra="ignore")


class Requirement(Part):
    """Requirement on a label of nodes, or on their names."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: Listed[str] = ()


class NodeTerm(Part):
    """Requirements that a node must all meet."""

    match_expressions: Listed[Requirement] = ()
    match_fields: Listed[Requirement] = ()


class NodeTerms(Part):
    """Terms of which a node must meet at least one."""

    node_selector_terms: Listed[NodeTerm]


class NodeAffinity(Part):
    """Nodes that a pod may run on."""

    required: NodeTerms | None = Field(None, alias="requiredDuringSchedulingIgnoredDuringExecution")


class Affinity(Part):
    """Affinity of a pod."""

    node_affinity: NodeAffinity = NodeAffinity()


class Toleration(Part):
    """A taint of nodes that a pod tolerates."""

    key: LabelKey | None = None
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class Named(Part):
    """An entry of a list that is merged by name."""

    name: str


class Mount(Part):
    """Mount of a volume in a container."""

    mount_path: str


class ContainerResources(Part):
    """Requests and limits of a container: resource name -> amount."""

    requests: dict[str, Any] = Field(default_factory=dict)
    limits: dict[str, Any] = Field(default_factory=dict)


class Container(Named):
    """Container of a pod."""

    env: Listed[Named] = ()
    volume_mounts: Listed[Mount] = ()
    resources: ContainerResources = ContainerResources()


class PodSpec(Part):
    """Scheduling and content of a pod."""

    node_selector: Labels = Field(default_factory=dict)
    tolerations: Listed[Toleration] = ()
    affinity: Affinity = Affinity()
    host_network: bool = False
    priority_class_name: str | None = None
    containers: Listed[Container] = ()
    init_containers: Listed[Container] = ()
    volumes: Listed[Named] = ()


class Metadata(Spec):
    """Labels and annotations of a pod template."""

    labels: Labels = Field(default_factory=dict)
    annotations: dict[LabelKey, str] = Field(default_factory=dict)


class Template(Spec):
    """Pod template."""

    metadata: Metadata = Metadata()
    spec: PodSpec = PodSpec()


def problems_of_templates(templates: Mapping[PodRole, Mapping[str, Any] | None]) -> list[Problem]:
    """Return the problems of pod templates by role, with paths such as `worker.template.spec`."""
    found = [(role, template_problems(template or {}, role)) for role, template in templates.items()]
    return [each.within(f"{role}.template.") for role, problems in found for each in problems]


def template_problems(template: Mapping[str, Any], role: PodRole) -> list[Problem]:
    """Return the problems of a pod template, with paths relative to the template."""
    try:
        read = validated(Template, template)
    except SpecError as found:
        return found.problems
    spec = template.get("spec") or {}
    return [
        *_without_keys(spec, "spec"),
        *(Problem(f"metadata.labels.{name}", OWN) for name in read.metadata.labels if OWN_LABEL.fullmatch(name)),
        *(Problem(f"spec.{field}", why) for field, why in REFUSED_FIELDS["pod"].items() if field in spec),
        *(
            Problem(f"spec.volumes.{place}.name", f'"{volume.name}" {OWN}; take another name')
            for place, volume in enumerate(read.spec.volumes)
            if OWN_VOLUME.fullmatch(volume.name)
        ),
        *(
            problem.within(f"spec.containers.{place}.")
            for place, container in enumerate(read.spec.containers)
            for problem in _of_container(container, spec["containers"][place], role)
        ),
    ]


def _without_keys(value: Any, path: str) -> Iterator[Problem]:
    """Yield a problem for each entry that lacks its key, in the lists that are merged by a key (KEYS)."""
    children = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    key = KEYS.get(path.rpartition(".")[2]) if isinstance(value, list) else None
    for name, each in children:
        if key and not (isinstance(each, Mapping) and isinstance(each.get(key), str | int)):
            yield Problem(f"{path}.{name}", f"expected a mapping with {key}")
        yield from _without_keys(each, f"{path}.{name}")


def _of_container(container: Container, given: Mapping[str, Any], role: PodRole) -> Iterator[Problem]:
    own, others = CONTAINERS[role], {name for names in CONTAINERS.values() for name in names} - {*CONTAINERS[role]}
    if container.name in others:
        yield Problem("name", f'"{container.name}" is in other pods; the operator\'s here: {", ".join(own)}')
    if container.name not in own:
        return
    yield from (Problem(field, why) for field, why in REFUSED_FIELDS["own_container"].items() if field in given)
    yield from _name_problems(container)
    for kind in ("requests", "limits") if container.name == own[0] else ():
        for resource in filter(OWN_RESOURCE.fullmatch, getattr(container.resources, kind)):
            field = f"spec.runtime.{role}.{resource}" if resource in ("cpu", "memory") else "spec.resources"
            yield Problem(f"resources.{kind}.{resource}", f"{OWN}; write {field}")


def _name_problems(container: Container) -> Iterator[Problem]:
    for place, mount in enumerate(container.volume_mounts):
        if OWN_FOLDER.fullmatch(mount.mount_path):
            yield Problem(f"volumeMounts.{place}.mountPath", f'"{mount.mount_path}" {OWN}')
    for place, variable in enumerate(container.env):
        if OWN_VARIABLE.fullmatch(variable.name):
            yield Problem(f"env.{place}.name", f'"{variable.name}" {OWN}')
