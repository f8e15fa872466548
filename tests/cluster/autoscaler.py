"""An autoscaler that is played: it adds a made-up node for each pod that the real scheduler finds no node for."""

import threading
from collections.abc import Mapping
from typing import Any, Self

from tests.cluster.client import Cluster
from tests.cluster.lifecycle import PODS, Document


class Autoscaler:
    """Node groups by name, each with the labels, the resources and the number of the nodes that it may add."""

    def __init__(self, server: Cluster, namespace: str, groups: Mapping[str, tuple[Document, Document, int]]) -> None:
        self._server, self._pods, self._groups = server, PODS.format(namespace), groups
        self.added: dict[str, list[str]] = {name: [] for name in groups}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(30)
        for name in (name for names in self.added.values() for name in names):
            self._server.remove_node(name)

    def _run(self) -> None:
        while not self._end.wait(0.3):
            pods = self._server.items(self._pods)
            for name, (labels, resources, most) in self._groups.items():
                meant = [pod for pod in pods if _accepts(pod, labels)]
                waiting = sum(map(_finds_no_node, meant))
                bound = sum(pod["spec"].get("nodeName", "") in self.added[name] for pod in meant)
                while len(self.added[name]) < min(bound + waiting, most):
                    node = f"{name}-{len(self.added[name])}"
                    self._server.add_node(node, resources, labels)
                    self.added[name].append(node)


def _finds_no_node(pod: Document) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any((each["type"], each.get("reason")) == ("PodScheduled", "Unschedulable") for each in conditions)


def _accepts(pod: Document, labels: Document) -> bool:
    """Whether a pod asks for all of these labels, by its node selector or in a term of its affinity."""
    spec = pod["spec"]
    affinity: Any = spec.get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [])
    terms = [{each["key"]: each.get("values", [""])[0] for each in term["matchExpressions"]} for term in required]
    return any(labels.items() <= term.items() for term in (spec.get("nodeSelector", {}), *terms))
