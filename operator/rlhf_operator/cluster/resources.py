"""The kinds of Kubernetes objects that the operator reads and writes, and their paths in the API."""

from typing import Any, Final, NamedTuple

from rlhf_api.names import GROUP, KIND, VERSION
from rlhf_operator import names
from rlhf_operator.cluster import raw


class Resource(NamedTuple):
    """Kind of object in the Kubernetes API."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the URL path of an object, or of a list if `name` is None; without `namespace`, of all namespaces."""
        base = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = (*(("namespaces", namespace) if namespace else ()), self.plural, name, subresource)
        return "/".join((base, *(part for part in parts if part)))


JOBS: Final = Resource(GROUP, VERSION, "rlhfjobs", KIND)
RAYJOBS: Final = Resource("ray.io", "v1", "rayjobs", "RayJob")
RAYCLUSTERS: Final = Resource("ray.io", "v1", "rayclusters", "RayCluster")
PODS: Final = Resource("", "v1", "pods", "Pod")
NODES: Final = Resource("", "v1", "nodes", "Node")
SLICES: Final = Resource("resource.k8s.io", "v1", "resourceslices", "ResourceSlice")
NODE_POOLS: Final = Resource("karpenter.sh", "v1", "nodepools", "NodePool")
WORKLOADS: Final = Resource("kueue.x-k8s.io", "v1beta1", "workloads", "Workload")
PRIORITIES: Final = Resource("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass")
CLAIMS: Final = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
POD_JOBS: Final = Resource("batch", "v1", "jobs", "Job")
SERVICES: Final = Resource("", "v1", "services", "Service")
CONFIG_MAPS: Final = Resource("", "v1", "configmaps", "ConfigMap")
POLICIES: Final = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
BUDGETS: Final = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
EVENTS: Final = Resource("events.k8s.io", "v1", "events", "Event")
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease")

CREATED: Final = {
    (each.api_version, each.kind): each
    for each in (RAYJOBS, CLAIMS, CONFIG_MAPS, POLICIES, BUDGETS, POD_JOBS, PODS, SERVICES)
}
"""Kinds that a plan may create, by (apiVersion, kind)."""

OURS: Final = f"{names.MANAGED_BY}={names.OPERATOR},{names.JOB_NAME}"
"""Label selector of the objects that the operator made for jobs, and of KubeRay's pods for them."""


def preferred(resource: Resource, group: Any) -> Resource:
    """Return the kind in the version that the API server prefers. group: the server's answer about the kind's group."""
    return resource._replace(version=raw.text(group, "preferredVersion", "version") or resource.version)
