"""Enforces NetworkPolicies on the real nodes, as a network plugin does: CNI's `ptp` knows nothing of them.

Only what jobs' policies use: ingress, labels to match, blocks of addresses, ports of TCP.
"""

import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from tests.cluster.client import Cluster

POLICIES = "/apis/networking.k8s.io/v1/networkpolicies"
SECONDS = 0.5
"""Between two looks at the cluster."""
TABLE = "inet policies"

Document = Mapping[str, Any]


class NetworkPlugin:
    """Of all nodes of a cluster. What a node itself sends to its own pods, such as probes, is never held up."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(10)

    def _work(self) -> None:
        told: dict[int, str] = {}
        while not self._end.wait(SECONDS):
            try:
                listed = (POLICIES, "/api/v1/pods", "/api/v1/namespaces")
                rules = ruleset(*(self._cluster.items(path) for path in listed))
            except (OSError, AssertionError):  # a test stops the API server
                continue
            for node in self._cluster.nodes_pids().values():
                if told.get(node["init"]) != rules and _tell(node["init"], rules):
                    told[node["init"]] = rules


def _tell(init: int, rules: str) -> bool:
    """Whether a node has taken the rules; one that was killed has not."""
    command = ["nsenter", "--target", str(init), "--net", "nft", "--file", "-"]
    return subprocess.run(command, input=rules, text=True, check=False).returncode == 0


def ruleset(policies: Sequence[Document], pods: Sequence[Document], namespaces: Sequence[Document]) -> str:
    """The rules for nft by which pods that a policy selects take connections from those only that one admits."""
    labels = {each["metadata"]["name"]: each["metadata"].get("labels", {}) for each in namespaces}
    there = [pod for pod in pods if pod["status"].get("podIP") and pod["status"]["phase"] in ("Pending", "Running")]
    admitted: set[str] = set()
    selected: set[str] = set()
    for policy in policies:
        namespace, spec = policy["metadata"]["namespace"], policy["spec"]
        for pod in there:
            if pod["metadata"]["namespace"] == namespace and _matches(spec["podSelector"], pod):
                address = pod["status"]["podIP"]
                selected.add(address)
                for rule in spec["ingress"]:
                    ports = ", ".join(str(port["port"]) for port in rule.get("ports", []))
                    to_ports = f"tcp dport {{ {ports} }} " if ports else ""
                    for source in _sources(rule["from"], namespace, there, labels):
                        admitted.add(f"ip daddr {address} ip saddr {source} {to_ports}accept")
    refused = [f"ip daddr {address} reject" for address in sorted(selected)]
    chain = "type filter hook forward priority 0; policy accept; ct state established,related accept"
    rules = "\n".join([chain, *sorted(admitted), *refused])
    return f"table {TABLE}\ndelete table {TABLE}\ntable {TABLE} {{\nchain forward {{\n{rules}\n}}\n}}\n"


def _sources(
    peers: Sequence[Document], namespace: str, pods: Sequence[Document], labels: Mapping[str, Document]
) -> Iterator[str]:
    """Addresses of the peers of a policy."""
    for peer in peers:
        if "ipBlock" in peer:
            yield peer["ipBlock"]["cidr"]
            continue
        wanted = peer.get("namespaceSelector", {}).get("matchLabels", {}).items()
        every = "namespaceSelector" in peer
        near = {name for name, own in labels.items() if (wanted <= own.items() if every else name == namespace)}
        for pod in pods:
            if pod["metadata"]["namespace"] in near and _matches(peer.get("podSelector", {}), pod):
                yield pod["status"]["podIP"]


def _matches(selector: Document, pod: Document) -> bool:
    wanted: Document = selector.get("matchLabels", {})
    labels: Document = pod["metadata"].get("labels", {})
    return wanted.items() <= labels.items()
