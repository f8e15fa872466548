"""Discovery of the kinds that the cluster offers and this service account may list."""

from typing import NamedTuple

from rlhf_operator.cluster import raw, resources
from rlhf_operator.cluster.cache import KindName
from rlhf_operator.cluster.client import FORBIDDEN, Client, NoClusterError, tolerate
from rlhf_operator.cluster.resources import OURS, Resource, preferred
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Capability


class Kind(NamedTuple):
    """Kind of object that the operator watches."""

    name: KindName
    resource: Resource
    selector: str = ""
    """Label selector of the watch, so that only objects of RLHFJobs are sent; empty: all objects."""
    namespaced: bool = True


class Offer(NamedTuple):
    """Kinds and capabilities that a cluster offers to the operator."""

    capabilities: frozenset[Capability] = frozenset()
    kinds: tuple[Kind, ...] = ()

    def __str__(self) -> str:
        return ", ".join(sorted(self.capabilities)) or "nothing"


async def discover(client: Client, settings: Settings) -> Offer:
    """Return the kinds and capabilities of the cluster. Raises NoClusterError if it has no RLHFJobs, or ApiError."""
    if not await _serves(client, resources.JOBS):
        what_to_do = "install the chart with crds.enabled=true, or apply crds/rlhfjobs.yaml"
        raise NoClusterError(f"the API server has no {resources.JOBS.plural}.{resources.JOBS.group}: {what_to_do}")
    kinds = [Kind(name="jobs", resource=resources.JOBS), Kind(name="claims", resource=resources.CLAIMS)]
    capabilities: set[Capability] = set()
    if await _serves(client, resources.RAYJOBS):
        capabilities.add("kuberay")
        kinds.append(Kind(name="rayjobs", resource=resources.RAYJOBS, selector=OURS))
    first = next(iter(settings.namespaces), None)
    if (kueue := await served(client, resources.WORKLOADS)) and await _may_list(client, kueue, first):
        capabilities.add("kueue")
        kinds.append(Kind(name="quotas", resource=kueue))
    selector = OURS
    if settings.read_nodes and await _may_list(client, resources.NODES, None):
        capabilities.add("nodes")
        kinds.append(Kind(name="nodes", resource=resources.NODES, namespaced=False))
        selector = ""  # foreign pods hold GPUs, too
        if await _may_list(client, resources.PRIORITIES, None):
            kinds.append(Kind(name="priorities", resource=resources.PRIORITIES, namespaced=False))
        if (slices := await served(client, resources.SLICES)) and await _may_list(client, slices, None):
            kinds.append(Kind(name="slices", resource=slices, namespaced=False))
    kinds.append(Kind(name="pods", resource=resources.PODS, selector=selector))
    return Offer(capabilities=frozenset(capabilities), kinds=tuple(kinds))


async def _serves(client: Client, resource: Resource) -> bool:
    answer = await client.find(f"/apis/{resource.group}/{resource.version}", "apis")
    return any(each.get("name") == resource.plural for each in raw.entries(answer, "resources"))


async def served(client: Client, resource: Resource) -> Resource | None:
    """Return a kind in the version that the API server prefers; None if the server does not have it."""
    answer = await client.find(f"/apis/{resource.group}", "apis")
    found = preferred(resource, answer)
    return found if answer and await _serves(client, found) else None


async def _may_list(client: Client, resource: Resource, namespace: str | None) -> bool:
    with tolerate(FORBIDDEN):
        await client.call("GET", resource.path(namespace), kind=resource.plural, query={"limit": "1"})
        return True
    return False
