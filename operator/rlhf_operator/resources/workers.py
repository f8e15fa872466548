"""Worker pods: one group for each zone of each pool; its hosts start together, except those of an elastic pool."""

import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from rlhf_api.names import POOL_RESOURCE
from rlhf_api.quantities import amount, times
from rlhf_api.status import MappedPool
from rlhf_mapper.mapping import Device
from rlhf_operator import names
from rlhf_operator.resources.identity import fixed_part
from rlhf_operator.resources.pods import AttemptPods, object_store, shared_memory
from rlhf_operator.snapshot import ObservedNode

RESERVED = "head"
"""Name of a worker group that KubeRay and Kueue reserve."""
INTERFACE = "eth0"
"""Name of a pod's own network interface."""


def groups(pods: AttemptPods) -> list[dict[str, Any]]:
    """Return Ray's worker groups in the order of the pools; a pool over several zones has a group in each zone."""
    parts: list[_Part] = []
    for pool in pods.mapping.pools:
        zones = pool.zones or ("",) * pool.nodes
        places = {zone: [place for place, each in enumerate(zones) if each == zone] for zone in dict.fromkeys(zones)}
        is_whole = len(places) == 1
        parts += [_Part(pool, zone, places[zone], "" if is_whole else f"-{n}") for n, zone in enumerate(places)]
    given = group_names([f"{part.pool.name}{part.suffix}" for part in parts])
    return [_group(pods, part, name) for part, name in zip(parts, given, strict=True)]


class _Part(NamedTuple):
    """Part of a pool: its nodes in one zone."""

    pool: MappedPool
    zone: str
    """Zone of the nodes; empty if the zone is unknown."""
    places: list[int]
    """Positions of the part's nodes in the pool, in the order of ranks."""
    suffix: str
    """Suffix of the pool's name in the group's name; empty if the part is the whole pool."""


def group_names(pools: Sequence[str]) -> list[str]:
    """Return a worker group name for each pool: the pool's name, prefixed by `pool-` if KubeRay would refuse it."""
    taken = {name for name in pools if name != RESERVED and not name[0].isdecimal()}
    given = []
    for pool in pools:
        name = pool
        while name == RESERVED or name[0].isdecimal() or (name != pool and name in taken):
            name = f"pool-{name}"
        taken.add(name)
        given.append(name)
    return given


def _group(pods: AttemptPods, part: _Part, name: str) -> dict[str, Any]:
    pool, runtime, on_gpus = part.pool, pods.job.spec.runtime, pods.mapping.device == "GPU"
    size, default = runtime.worker, pods.settings.worker
    memory = size.memory or times(default.memory, pool.slots_per_node)
    resources = {
        "cpu": size.cpu or times(default.cpu, pool.slots_per_node),
        "memory": memory,
        **({pods.gpu_resource: str(pool.slots_per_node)} if on_gpus else {}),
    }
    threads = max(1, int(amount(resources["cpu"])) // pool.slots_per_node)
    on_host = pods.settings.pod_of(runtime, names.WORKER).host_network
    variables = {"OMP_NUM_THREADS": str(threads), **_collectives(pods.mapping.device, on_host=on_host)}
    shared = shared_memory(runtime.shared_memory or pods.settings.shared_memory, memory, share=Fraction(1, 2))
    ray = {
        **pods.container(names.WORKER_CONTAINER, resources, variables, leaves_early=pool.max_nodes is not None),
        "ports": [{"name": "metrics", "containerPort": names.RAY_METRICS_PORT}],
    }
    taint = {"key": pods.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    pod = {
        "containers": [ray],
        "volumes": pods.volumes(shared),
        **({"dnsPolicy": "ClusterFirstWithHostNet"} if on_host else {}),
        **({"tolerations": [taint]} if on_gpus else {}),
        **_affinity(pods, part),
    }
    own = POOL_RESOURCE + pool.name
    # If zones matter, the trainer requests the nodes of its ranks by their positions.
    resource_names = [own, *(f"{own}:{place}" for place in part.places if part.suffix)]
    hosts = len(part.places)
    # Hosts of an elastic pool come and go one by one; those of others start together or not at all.
    replicas, most, hosts = (hosts, pool.max_nodes, 1) if pool.max_nodes else (1, 1, hosts)
    return {
        "groupName": name,
        "replicas": replicas,
        "minReplicas": replicas,
        "maxReplicas": most,
        "numOfHosts": hosts,
        "rayStartParams": {
            "num-cpus": str(pool.slots_per_node),
            "num-gpus": str(pool.slots_per_node if on_gpus else 0),
            "object-store-memory": object_store(shared),
            "resources": f"'{json.dumps(dict.fromkeys(resource_names, pool.slots_per_node))}'",  # in a shell's quotes
        },
        "template": pods.template(names.WORKER, pod, pool=pool),
    }


def _collectives(device: Device, *, on_host: bool) -> dict[str, str]:
    """Return the variables of NCCL and Gloo; the interface is set unless the pod uses its node's network."""
    libraries = ("GLOO",) if device == "CPU" else ("GLOO", "NCCL")
    interface = {} if on_host else {f"{each}_SOCKET_IFNAME": INTERFACE for each in libraries}
    return {**interface, **(fixed_part("collectives") if device == "GPU" else {})}


def _affinity(pods: AttemptPods, part: _Part) -> dict[str, Any]:
    """Return the affinity to nodes of the mapped GPU type and zone without shared GPUs; none for placement by hand.

    Pods of an elastic pool prefer spot nodes.
    """
    if pods.job.spec.placement.mode == "Manual":  # elastic pools are placed by hand
        spot = [_labels_are(each.match_labels) for each in pods.settings.node_groups if each.spot]
        preferred = [{"weight": 100, "preference": {"matchExpressions": each}} for each in spot if part.pool.max_nodes]
        rule = "preferredDuringSchedulingIgnoredDuringExecution"
        return {"affinity": {"nodeAffinity": {rule: preferred}}} if preferred else {}
    if part.pool.gpu is None:
        return {}
    nodes = pods.snapshot.nodes or ()
    ways = {label: {node.labels.get(label, "none") for node in nodes} - {"none"} for label in names.GPU_SHARING}
    common = [{"key": label, "operator": "NotIn", "values": sorted(found)} for label, found in ways.items() if found]
    common += [_label_is(level.label, part.zone) for level in pods.settings.topology]
    terms = [{"matchExpressions": [*labels, *common]} for labels in _labels_of(pods, part.pool.gpu, nodes)]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"affinity": {"nodeAffinity": required}} if terms else {}


def _labels_of(pods: AttemptPods, gpu: str, nodes: Sequence[ObservedNode]) -> Iterator[list[dict[str, Any]]]:
    """Yield alternatives of required node labels for a GPU type, by the mapper's name of the type."""
    types = {node.name: pods.settings.gpu_of(names.gpu_product(node.labels, pods.gpu_resource)) for node in nodes}
    fitting = [node for node in nodes if (known := types[node.name]) and known.name == gpu]
    yield from _products(nodes, fitting)
    # An autoscaler knows a group that may add fitting nodes by its labels.
    growing = {node.group for node in fitting} - {names.group_of(each) for each in pods.avoided}
    yield from (_labels_are(each.match_labels) for each in pods.settings.node_groups if each.name in growing)


def _products(nodes: Sequence[ObservedNode], fitting: Sequence[ObservedNode]) -> Iterator[list[dict[str, Any]]]:
    """Yield the required node labels of each product of fitting nodes: its name, and details if any node has them."""
    used = [detail for detail in names.GPU_DETAILS if any(detail in node.labels for node in nodes)]
    products: dict[tuple[str, ...], set[str]] = {}
    for node in fitting:
        if not node.group:
            label, values = names.gpu_label(node.labels), [node.labels.get(detail, "") for detail in used]
            products.setdefault((label, *values), set()).add(node.labels[label])
    for (label, *values), found in sorted(products.items()):
        details = (_label_is(detail, value) for detail, value in zip(used, values, strict=True))
        yield [{"key": label, "operator": "In", "values": sorted(found)}, *details]


def _labels_are(labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the requirements that labels have these values."""
    return [_label_is(label, value) for label, value in sorted(labels.items())]


def _label_is(key: str, value: str) -> dict[str, Any]:
    """Return the requirement that a label has a value; empty: that the label is missing."""
    return {"key": key, "operator": "In", "values": [value]} if value else {"key": key, "operator": "DoesNotExist"}
