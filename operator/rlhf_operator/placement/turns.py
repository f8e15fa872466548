"""Order of the line: by priority, then by the weighted slots that a job's namespace holds, then by age.

The order follows from the statuses of all jobs. Jobs that hold room are not in line.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple

from rlhf_api.checks.pod_template import template_problems
from rlhf_api.spec.runtime import Runtime
from rlhf_operator import names
from rlhf_operator.placement.suitable import suits
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import NodeRequest, ObservedJob, ObservedNode


class NodeDemand(NamedTuple):
    """Names of the nodes that a job's workers may use, and the priority of these pods."""

    nodes: frozenset[str]
    priority: int


class Turns:
    """Turns of waiting jobs, on the nodes, priority classes and holders of room at one moment."""

    def __init__(
        self,
        nodes: Sequence[ObservedNode],
        priorities: Mapping[str, int],
        holders: Iterable[ObservedJob],
        settings: Settings,
    ) -> None:
        self._nodes, self._priorities, self._settings = nodes, priorities, settings
        self._demands: dict[NodeRequest, NodeDemand] = {}
        held = Counter[str]()
        for job in holders:
            held[job.namespace] += job.status.mapping.slots if job.status.mapping else 1
        weights = settings.queue.namespace_weights
        self._shares = {namespace: slots / weights.get(namespace, 1.0) for namespace, slots in held.items()}

    def of(self, job: ObservedJob) -> tuple[int, float, datetime, str, str]:
        """Return the sort key of a job's turn; the job with the smallest key comes first."""
        share = self._shares.get(job.namespace, 0.0)
        return -self.demand(job.node_request).priority, share, job.created, job.namespace, job.name

    def first(self, line: Iterable[ObservedJob]) -> list[ObservedJob]:
        """Return the jobs that may begin next, in the line's order: each may use a node that earlier ones may not."""
        claimed, found = frozenset[str](), []
        for job in sorted(line, key=self.of):
            nodes = self.demand(job.node_request).nodes
            if not nodes <= claimed:
                claimed |= nodes
                found.append(job)
        return found

    def demand(self, request: NodeRequest) -> NodeDemand:
        """Return the node demand of jobs with this request; without a mapping it is all suitable nodes."""
        if request in self._demands:
            return self._demands[request]
        runtime, device = _runtime(request[0]), request[1]
        resource = "" if device == "CPU" else self._settings.gpu_resource_of(runtime)
        pod = self._settings.pod_of(runtime, names.WORKER)
        suited = (node for node in self._nodes if suits(node, pod, resource))
        nodes = frozenset(node.name for node in suited if self._has_mapped_gpus(node, request, resource))
        demand = NodeDemand(nodes, self._priorities.get(pod.priority_class_name or "", 0))
        self._demands[request] = demand
        return demand

    def _has_mapped_gpus(self, node: ObservedNode, request: NodeRequest, resource: str) -> bool:
        """Whether a node has GPUs (`resource`) if the request needs any, and of a type that the request names."""
        _, device, types = request
        if device and resource and resource not in node.allocatable:
            return False
        if None in types:
            return True
        gpu = self._settings.gpu_of(names.gpu_product(node.labels, resource))
        return gpu is not None and gpu.name in types


@lru_cache(maxsize=1024)
def _runtime(text: str) -> Runtime:
    """Parse spec.runtime; return the default runtime if it cannot be read."""
    try:
        runtime = Runtime.model_validate(json.loads(text), by_alias=True, by_name=False)
    except (ValueError, RecursionError):
        return Runtime()
    return Runtime() if template_problems(runtime.worker.template or {}, "worker") else runtime
