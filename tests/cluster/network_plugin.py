"""Enforces NetworkPolicies on the real nodes, as a network plugin does: CNI's `ptp` knows nothing of them.

What jobs' policies use: ingress and egress, selectors, blocks of addresses, ports of TCP and UDP by their numbers.
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
ENDS = {"Egress": ("saddr", "daddr"), "Ingress": ("daddr", "saddr")}
"""Type of a policy -> where a packet has the address of the pod that it selects, and that of the peer."""
EVERYBODY = ({"ipBlock": {"cidr": "0.0.0.0/0"}},)
"""Peers of a rule that names none."""
PEERS = {"Egress": "to", "Ingress": "from"}
"""Type of a policy -> key of a rule's peers."""

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
    """The rules for nft by which pods that policies select have only those connections that one of these admits.

    Both ends have to: so the rules of the sender's end and of the receiver's are in chains of their own, which a packet
    returns from if it is admitted. They come after kube-proxy's, which has put a pod's address in place of a Service's.
    """
    labels = {each["metadata"]["name"]: each["metadata"].get("labels", {}) for each in namespaces}
    there = [pod for pod in pods if pod["status"].get("podIP") and pod["status"]["phase"] in ("Pending", "Running")]
    chains = {}
    for kind, (own, other) in ENDS.items():
        admitted: set[str] = set()
        selected: set[str] = set()
        for policy in policies:
            namespace, spec = policy["metadata"]["namespace"], policy["spec"]
            chosen = [pod for pod in there if pod["metadata"]["namespace"] == namespace]
            for pod in chosen if kind in spec["policyTypes"] else []:
                if not _matches(spec["podSelector"], pod["metadata"].get("labels", {})):
                    continue
                address = pod["status"]["podIP"]
                selected.add(f"ip {own} {address} reject")
                for rule in spec.get(kind.lower(), []):
                    peers = rule.get(PEERS[kind], EVERYBODY)
                    found = [*_peers(peers, namespace, there, labels, other)]
                    admitted |= {f"ip {own} {address} {peer} {port} return" for peer in found for port in _ports(rule)}
        chains[kind] = "\n".join([*sorted(admitted), *sorted(selected)])
    first = "type filter hook prerouting priority 0; policy accept; ct state established,related accept"
    jumps = "\n".join(f"jump {kind}" for kind in chains)
    written = "".join(f"chain {kind} {{\n{rules}\n}}\n" for kind, rules in chains.items())
    return f"table {TABLE}\ndelete table {TABLE}\ntable {TABLE} {{\n{written}chain first {{\n{first}\n{jumps}\n}}\n}}\n"


def _ports(rule: Document) -> list[str]:
    """What nft has to match for the ports of a rule; all ports without any."""
    return [f"{port.get('protocol', 'TCP').lower()} dport {port['port']}" for port in rule.get("ports", [])] or [""]


def _peers(
    peers: Sequence[Document], namespace: str, pods: Sequence[Document], labels: Mapping[str, Document], end: str
) -> Iterator[str]:
    """Matches of nft for the addresses of the peers of a policy, `saddr` or `daddr` by `end`; there is no IPv6 here."""
    for peer in peers:
        if block := peer.get("ipBlock"):
            closed = "".join(f" ip {end} != {each}" for each in block.get("except", []))
            yield from [f"ip {end} {block['cidr']}{closed}"] if ":" not in block["cidr"] else []
            continue
        every = "namespaceSelector" in peer
        wanted = peer.get("namespaceSelector", {})
        near = {name for name, own in labels.items() if (_matches(wanted, own) if every else name == namespace)}
        for pod in pods:
            own = pod["metadata"].get("labels", {})
            if pod["metadata"]["namespace"] in near and _matches(peer.get("podSelector", {}), own):
                yield f"ip {end} {pod['status']['podIP']}"


def _matches(selector: Document, labels: Mapping[str, str]) -> bool:
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items() and all(
        _holds(each["operator"], labels.get(each["key"]), each.get("values", []))
        for each in selector.get("matchExpressions", [])
    )


def _holds(operator: str, value: str | None, values: Sequence[str]) -> bool:
    if operator in ("In", "NotIn"):
        return (value in values) == (operator == "In")
    return (value is not None) == (operator == "Exists")
