"""Node groups as autoscalers state them: Karpenter's NodePools, and the status that Cluster Autoscaler writes.

An entry of the settings with the name of such a group says what its nodes are; the autoscaler says how many there may
be. A group without such an entry is planned on if a NodePool tells the number and type of the GPUs of its nodes.
"""

from collections.abc import Awaitable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

from rlhf_api import kubectl_yaml
from rlhf_api.problems import SpecError
from rlhf_api.quantities import amount
from rlhf_operator import names
from rlhf_operator.cluster import raw
from rlhf_operator.cluster.client import FORBIDDEN, Client, tolerate
from rlhf_operator.cluster.discovery import served
from rlhf_operator.cluster.resources import CONFIG_MAPS, NODE_POOLS
from rlhf_operator.settings import NodesOfGroup, NodeTaint, Settings
from rlhf_operator.snapshot import Document
from rlhf_planning.market import INSTANCES

T = TypeVar("T")
UNLIMITED: Final = 64
"""Number of nodes up to which jobs are planned on a NodePool without a limit."""
MAX_NAMES, MAX_NODES = 5, 10_000
STATUS: Final = ("kube-system", "cluster-autoscaler-status")
NODE_POOL, CAPACITY_TYPE = "karpenter.sh/nodepool", "karpenter.sh/capacity-type"
INSTANCE_TYPE, GPU_COUNT = "node.kubernetes.io/instance-type", "karpenter.k8s.aws/instance-gpu-count"


async def read_live_groups(client: Client, settings: Settings) -> tuple[Settings, tuple[str, ...]]:
    """Return the settings with the autoscalers' groups, and sentences on unusable groups and missing rights."""
    refused = list[str]()

    async def found(reading: Awaitable[T], what: str) -> T | None:
        with tolerate(FORBIDDEN):
            return await reading
        refused.append(f"the operator may not read {what}, so it knows no groups from there; see the chart's rbac")
        return None

    if not settings.read_nodes:
        return settings, ()
    kind = await served(client, NODE_POOLS)
    pools = await found(client.list(kind, None), "Karpenter's NodePools") if kind else None
    status = await found(client.get(CONFIG_MAPS, *STATUS), f"ConfigMap {'/'.join(STATUS)}")
    known, unusable = with_live_groups(settings, pools.items if pools else (), raw.text(status, "data", "status"))
    return known, (*refused, *unusable)


class LiveGroup(NamedTuple):
    """Node group as its autoscaler states it."""

    name: str
    least: int
    limits: Document
    """Most nodes, GPUs and other resources that the group may have, as a NodePool writes them."""
    spot: bool = False
    nodes: NodesOfGroup | None = None
    """Nodes of the group; None if the autoscaler does not tell what they are."""
    problem: str = ""
    """Why the autoscaler adds no node; empty if it may."""


def with_live_groups(settings: Settings, pools: Iterable[Document], status: str) -> tuple[Settings, tuple[str, ...]]:
    """Return the settings with the autoscalers' groups, and a sentence for each reason why jobs cannot use groups.

    pools: Karpenter's NodePools; status: text of Cluster Autoscaler's status. Groups of the settings come first, then
    NodePools, those of higher weight first.
    """
    entries = {each.name or f"/{at}": each for at, each in enumerate(settings.node_groups)}
    of_pools = {pool: key for key, each in entries.items() if (pool := each.match_labels.get(NODE_POOL))}
    lacking = dict[str, str]()
    ordered = sorted(pools, key=lambda each: raw.text(each, "metadata", "name"))
    ordered.sort(key=lambda each: -(raw.number(each, "spec", "weight") or 0))
    for live in (*map(_of_pool, ordered), *_of_status(status)):
        key = live.name if live.name in entries else of_pools.get(live.name, live.name)
        entry = entries.get(key) or live.nodes
        why = live.problem or _why_unusable(entry, settings)
        if why:
            lacking[live.name] = why
        if entry:
            most = 0 if why else _most(live.limits, entry)
            name = entry.name or live.name
            stated = {"name": name, "least": min(live.least, most), "most": most, "spot": entry.spot or live.spot}
            entries[key] = entry.model_copy(update=stated)
    reasons = {why: [name for name, each in lacking.items() if each == why] for why in lacking.values()}
    unusable = (
        f"no job is planned on node group {_listed(of)} of the autoscaler: {why}" for why, of in reasons.items()
    )
    return settings.model_copy(update={"node_groups": tuple(entries.values())}), tuple(unusable)


def _why_unusable(group: NodesOfGroup | None, settings: Settings) -> str:
    if group is None or not group.match_labels:
        return "it does not say what GPUs its nodes have; an entry of this name in cluster.nodeGroups can"
    lacks = [each.label for each in settings.topology if each.label not in group.match_labels]
    return f"its nodes may have any {lacks[0]}, which cluster.topology names" if lacks else ""


def _listed(of: list[str]) -> str:
    return ", ".join(of[:MAX_NAMES]) + f" and {len(of) - MAX_NAMES} more" * (len(of) > MAX_NAMES)


def _of_pool(pool: Document) -> LiveGroup:
    """Return the group of a NodePool (karpenter.sh/v1)."""
    name, spec = raw.text(pool, "metadata", "name"), raw.mapping(pool, "spec", "template", "spec")
    allowed = {
        raw.text(each, "key"): [str(value) for value in found]
        for each in raw.entries(spec, "requirements")
        if each.get("operator") == "In" and isinstance(found := each.get("values"), list)
    }
    fixed = {key: values[0] for key, values in allowed.items() if len(values) == 1}
    labels = {NODE_POOL: name, **raw.texts(pool, "spec", "template", "metadata", "labels"), **fixed}
    product, gpus = _gpus_of(allowed.get(INSTANCE_TYPE, []), labels)
    ready, problem = raw.find_condition(pool, "Ready"), ""
    if ready.get("status") == "False":
        problem = f"it is not ready: {raw.text(ready, 'message') or raw.text(ready, 'reason')}"
    nodes = None
    if product:
        taints = tuple(
            NodeTaint.model_construct(key=raw.text(each, "key"), value=raw.text(each, "value"), effect=each["effect"])
            for each in raw.entries(spec, "taints")
            if each.get("effect") in ("NoSchedule", "PreferNoSchedule", "NoExecute")
        )
        nodes = NodesOfGroup.model_construct(match_labels=labels, gpu=product, gpus_per_node=gpus, taints=taints)
    limits = raw.mapping(pool, "spec", "limits")
    return LiveGroup(name, 0, limits, "spot" in allowed.get(CAPACITY_TYPE, ()), nodes, problem)


def _gpus_of(types: list[str], labels: Mapping[str, str]) -> tuple[str, int]:
    """Return the GPU product and number of GPUs of a NodePool's nodes; ("", 0) if nodes differ or are unknown."""
    known = {(found.product, found.gpus) if (found := INSTANCES.get(each)) else ("", 0) for each in types}
    if len(known) == 1 and all(each[0] for each in known):
        return known.pop()
    count, product = labels.get(GPU_COUNT, ""), names.gpu_product(labels, "")
    return (product, int(count)) if product and count.isdecimal() and 0 < int(count) <= 1024 else ("", 0)


def _most(limits: Document, group: NodesOfGroup) -> int:
    """Return how many nodes a group may have by its limits, existing nodes included.

    Limits of CPUs and memory count if the settings say what a node has. Without a limit: its `max`, else UNLIMITED.
    """
    of_node = {"nodes": "1", "cpu": group.cpu, "memory": group.memory}
    found = []
    for resource, limit in limits.items():
        share = str(group.gpus_per_node) if names.is_gpu_resource(resource) else of_node.get(resource)
        with suppress(ValueError, ZeroDivisionError):
            found.append(int(amount(str(limit)) // amount(share or "0")))
    return min((*found, MAX_NODES) if found else (group.most or UNLIMITED,))


def _of_status(status: str) -> Iterator[LiveGroup]:
    """Yield the groups of Cluster Autoscaler's status; a cloud's path before a group's name is cut off."""
    try:
        (document, *_) = kubectl_yaml.read(status, "")
    except (SpecError, ValueError):
        return
    for each in raw.entries(document, "nodeGroups"):
        least, most = (raw.number(each, "health", size) or 0 for size in ("minSize", "maxSize"))
        yield LiveGroup(raw.text(each, "name").rpartition("/")[2], least, {"nodes": most})
