"""Worker pods: a group for each pool of the mapping, all its hosts together or none; what they need of the network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from rlhf_api.names import POOL_RESOURCE
from rlhf_api.quantities import amount, times
from rlhf_api.status import MappedPool
from rlhf_mapper.mapping import Device
from rlhf_operator import names
from rlhf_operator.resources import identity
from rlhf_operator.resources.pods import Pods, object_store, shared_memory

RESERVED = "head"
"""Of KubeRay and Kueue."""
INTERFACE = "eth0"
"""What the kubelet calls a pod's own interface."""


def groups(pods: Pods) -> list[dict[str, Any]]:
    """The worker groups in the order of the pools; a pool over several zones has one in each."""
    parts = [part for pool in pods.mapping.pools for part in _parts(pool)]
    given = group_names([f"{part.pool.name}{part.suffix}" for part in parts])
    return [_group(pods, part, name) for part, name in zip(parts, given, strict=True)]


class _Part(NamedTuple):
    """The nodes of a pool in one zone."""

    pool: MappedPool
    zone: str
    """Empty where nobody says."""
    places: list[int]
    """Of the nodes in the order of ranks."""
    suffix: str = ""
    """To the pool's name, if this is not all of it."""


def _parts(pool: MappedPool) -> list[_Part]:
    zones = pool.zones or ("",) * pool.nodes
    found = {zone: [place for place, each in enumerate(zones) if each == zone] for zone in dict.fromkeys(zones)}
    if len(found) == 1:
        return [_Part(pool, zones[0], list(range(pool.nodes)))]
    return [_Part(pool, zone, places, f"-{index}") for index, (zone, places) in enumerate(found.items())]


def group_names(pools: Sequence[str]) -> list[str]:
    """A name for the group of each pool: its own, where KubeRay takes that."""
    taken = {name for name in pools if name != RESERVED and not name[0].isdecimal()}
    given = []
    for pool in pools:
        name = pool
        while name == RESERVED or name[0].isdecimal() or (name != pool and name in taken):
            name = f"pool-{name}"
        taken.add(name)
        given.append(name)
    return given


def _group(pods: Pods, part: _Part, name: str) -> dict[str, Any]:
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
        **pods.container(names.WORKER_CONTAINER, resources, variables),
        "ports": [{"name": "metrics", "containerPort": names.RAY_METRICS_PORT}],
        "securityContext": identity.of_container(),
    }
    network = {"dnsPolicy": "ClusterFirstWithHostNet"} if on_host else {}
    pod = {"containers": [ray], "volumes": pods.volumes(shared), **network, **_where(pods, part)}
    own = POOL_RESOURCE + pool.name
    # Where zones matter, the trainer asks for the nodes of its ranks by their places.
    held = [own, *(f"{own}:{place}" for place in part.places if part.suffix)]
    return {
        "groupName": name,
        "replicas": 1,
        "minReplicas": 1,
        "maxReplicas": 1,
        "numOfHosts": len(part.places),
        "rayStartParams": {
            "num-cpus": str(pool.slots_per_node),
            "num-gpus": str(pool.slots_per_node if on_gpus else 0),
            "object-store-memory": object_store(shared),
            "resources": f"'{json.dumps(dict.fromkeys(held, pool.slots_per_node))}'",  # in a shell's quotes
        },
        "template": pods.template(names.WORKER, pod, pool=pool.name),
    }


def _collectives(device: Device, *, on_host: bool) -> dict[str, str]:
    """Variables of collectives; of the interface only where its name is known: not on the network of the node."""
    interface = {} if on_host else {"GLOO_SOCKET_IFNAME": INTERFACE}
    if device == "CPU":
        return interface
    if interface:
        interface["NCCL_SOCKET_IFNAME"] = INTERFACE
    return {
        **interface,
        "NCCL_DEBUG": "WARN",
        # What each rank did last, beside the log, where a collective hangs.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    }


def _where(pods: Pods, part: _Part) -> dict[str, Any]:
    """Which nodes the pods of a pool may go to, besides what templates say."""
    taint = {"key": pods.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    affinity = _products(pods, part)
    return {
        **({"tolerations": [taint]} if pods.mapping.device == "GPU" else {}),
        **({"affinity": affinity} if affinity else {}),
    }


def _products(pods: Pods, part: _Part) -> dict[str, Any]:
    """Nodes of the type of GPU and in the zone that the mapper chose, not shared.

    A user who places by hand chooses nodes too.
    """
    pool = part.pool
    if pool.gpu is None or pods.job.spec.placement.mode == "Manual":
        return {}
    alike: dict[tuple[str, ...], set[str]] = {}
    nodes = pods.snapshot.nodes or ()
    for node in nodes:
        label = names.gpu_label(node.labels)
        known = pods.settings.gpu_of(names.gpu_product(node.labels, pods.gpu_resource))
        if known and known.name == pool.gpu:
            values = [node.labels.get(detail, "") for detail in names.GPU_DETAILS]
            alike.setdefault((label, *values), set()).add(node.labels[label])
    unshared = [
        {"key": label, "operator": "NotIn", "values": sorted(ways)}
        for label in names.GPU_SHARING
        if (ways := {node.labels.get(label, "none") for node in nodes} - {"none"})
    ]
    is_there = {"operator": "In", "values": [part.zone]} if part.zone else {"operator": "DoesNotExist"}
    zone = [{"key": level.label, **is_there} for level in pods.settings.topology]
    used = [detail for detail in names.GPU_DETAILS if any(detail in node.labels for node in nodes)]
    terms = []
    for (label, *told), products in sorted(alike.items()):
        details = [
            {"key": detail, "operator": "In", "values": [value]}
            if value
            else {"key": detail, "operator": "DoesNotExist"}
            for detail, value in zip(names.GPU_DETAILS, told, strict=True)
            if detail in used
        ]
        product = {"key": label, "operator": "In", "values": sorted(products)}
        terms.append({"matchExpressions": [product, *details, *unshared, *zone]})
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"nodeAffinity": required} if terms else {}
