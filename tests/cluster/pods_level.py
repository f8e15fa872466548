"""Level pods: every node is a set of namespaces on this machine, linked by veth pairs."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import cgroups
from tests.cluster.client import Cluster
from tests.cluster.credentials import write_credentials
from tests.cluster.images import write_images
from tests.cluster.node_files import node_ip, write_node_files
from tests.cluster.processes import TAIL, FailedError, die_with_parent, output_of
from tests.cluster.settings import CGROUP, HOST_IP, NODE_IP, NODE_NET, POD_NET, ROOT, SERVICE_NET, Settings

LOCK = Path("/run/rlhf-cluster.lock")
LINK = "kc0"
"""The machine's device to node 0."""
NETWORKS = (POD_NET, SERVICE_NET, NODE_NET)


@dataclass(frozen=True)
class Node:
    """A node's namespaces: the process that holds them, and PID 1 in there."""

    holder: subprocess.Popen[bytes]
    init: int

    @property
    def runs(self) -> bool:
        """True until somebody kills it."""
        return self.holder.poll() is None


def run(settings: Settings) -> None:
    """Stay in the foreground until SIGTERM or SIGINT, then take everything away; FailedError if node 0 ends."""
    folder = Path(settings.folder)
    asked_to_end: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: asked_to_end.append(received))
    with the_only_one(asked_to_end):
        settings.save()
        write_credentials(settings)
        write_images(folder / "images", Path(settings.programs) / "pause")
        (folder / "log").mkdir()
        nodes: dict[int, Node] = {}
        try:
            for index in range(settings.nodes):
                start_node(settings, nodes, index)
            wait_until_ready(settings, nodes, asked_to_end)
            watch(settings, nodes, asked_to_end)
        finally:
            end(nodes)


@contextmanager
def the_only_one(asked_to_end: list[int]) -> Iterator[None]:
    """Networks, the link and the cgroups have fixed names: wait until no other cluster with pods runs here."""
    with LOCK.open("a") as lock:
        told = False
        while not asked_to_end:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not told:
                    print("another cluster with pods runs on this machine; waiting for its end", flush=True)
                told = True
                time.sleep(0.5)
        yield


def start_node(settings: Settings, nodes: dict[int, Node], index: int) -> None:
    """Make a node's namespaces, its links, and have `tests.cluster.node` run in there."""
    folder = Path(settings.folder)
    write_node_files(settings, index)
    cgroups.make(f"{CGROUP}{index}")
    own = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"]
    command = [*own, sys.executable, "-m", "tests.cluster", "_node", str(folder), str(index)]
    with (folder / "log" / f"node{index}.log").open("ab") as log:
        holder = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 no threads here
        )
    nodes[index] = node = Node(holder, first_process(holder))
    if index == 0:
        link_to_machine(node)
    else:
        link_to_first(nodes[0], node, index)
    pids = {f"node{each}": {"kill": node.holder.pid, "init": node.init} for each, node in nodes.items()}
    (folder / "nodes.json").write_text(json.dumps(pids))


def first_process(holder: subprocess.Popen[bytes]) -> int:
    """PID 1 of new namespaces, as this machine numbers it, once it is inside them."""
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
    while not (listed := children.read_text().split()):
        time.sleep(0.01)
    here = os.readlink("/proc/self/ns/net")  # noqa: PTH115 a link to no path
    while os.readlink(f"/proc/{listed[0]}/ns/net") == here:  # noqa: PTH115
        time.sleep(0.01)
    return int(listed[0])


def link_to_machine(node: Node) -> None:
    """This machine reaches node 0, its pods and services; the blackholes are for when it is gone."""
    subprocess.run(["ip", "link", "del", LINK], capture_output=True, check=False)  # of a run that was killed
    for network in NETWORKS:
        output_of("ip", "route", "replace", "blackhole", network, "metric", "4096")
    output_of("ip", "link", "add", LINK, "type", "veth", "peer", "name", "eth0", "netns", node.init)
    output_of("ip", "addr", "add", f"{HOST_IP}/30", "dev", LINK)
    output_of("ip", "link", "set", LINK, "up")
    for network in NETWORKS:
        output_of("ip", "route", "add", network, "via", NODE_IP)


def link_to_first(first: Node, node: Node, index: int) -> None:
    """Node 0 reaches another node and its pods; what is sent on goes through node 0."""
    in_first = ("nsenter", "-t", first.init, "-n", "ip")
    subprocess.run([str(word) for word in (*in_first, "link", "del", f"n{index}")], capture_output=True, check=False)
    output_of(*in_first, "link", "add", f"n{index}", "type", "veth", "peer", "name", "eth0", "netns", node.init)
    output_of(*in_first, "addr", "add", f"10.250.{index}.1/30", "dev", f"n{index}")
    output_of(*in_first, "link", "set", f"n{index}", "up")
    output_of(*in_first, "route", "replace", f"10.244.{index}.0/24", "via", node_ip(index))


def wait_until_ready(settings: Settings, nodes: dict[int, Node], asked_to_end: list[int]) -> None:
    """Until every kubelet says so; then FOLDER/ready.json is there."""
    folder = Path(settings.folder)
    cluster = Cluster(folder)
    for index, node in nodes.items():
        up = folder / f"node{index}" / "up.json"
        while not asked_to_end and not (up.exists() and cluster.node_is_ready(f"node{index}")):
            if not node.runs:
                said = (folder / "log" / f"node{index}.log").read_text(errors="replace")[-TAIL:]
                raise FailedError(f"node{index} does not start\n{said}")
            time.sleep(0.1)
    if asked_to_end:
        return
    times = json.loads((folder / "node0" / "up.json").read_text())
    times["ready"] = round(time.time() - settings.started, 2)
    (folder / "ready.json").write_text(json.dumps(times))
    print(f"ready: KUBECONFIG={folder}/admin.kubeconfig {times}", flush=True)


def watch(settings: Settings, nodes: dict[int, Node], asked_to_end: list[int]) -> None:
    """Until asked to end: start a killed node again when a test asks for it by FOLDER/start-node<i>."""
    folder = Path(settings.folder)
    while not asked_to_end:
        if not nodes[0].runs:
            said = (folder / "log" / "node0.log").read_text(errors="replace")[-TAIL:]
            raise FailedError(f"node0 ended\n{said}")
        for index in range(1, settings.nodes):
            order = folder / f"start-node{index}"
            if order.exists() and not nodes[index].runs:
                order.unlink()
                start_node(settings, nodes, index)
        time.sleep(0.1)


def end(nodes: dict[int, Node]) -> None:
    """Kill the nodes; namespaces, mounts and rules go with them."""
    for node in nodes.values():
        node.holder.kill()
    for node in nodes.values():
        node.holder.wait()
    subprocess.run(["ip", "link", "del", LINK], capture_output=True, check=False)
    for index in nodes:
        cgroups.remove(f"{CGROUP}{index}")
