"""What one test cluster is made of, and where its parts listen."""

import base64
import dataclasses
import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Level = Literal["api", "pods"]

ROOT = Path(__file__).resolve().parents[2]
HOST_IP = "10.250.0.1"
"""The machine's end of the veth pair to node 0."""
NODE_IP = "10.250.0.2"
NODE_NET, POD_NET, SERVICE_NET = "10.250.0.0/16", "10.244.0.0/16", "10.96.0.0/16"
API_SERVICE_IP = "10.96.0.1"
DOCUMENTATION_IP = "198.51.100.1"
"""Level api advertises it: a loopback address is not allowed there, and nothing listens on this one."""
MAX_NODES = 4
CGROUP = "/testcluster"
PORTS = {
    "server": 6443,
    "etcd": 2379,
    "etcd_peer": 2380,
    "controllers": 10257,
    "scheduler": 10259,
    "kuberay_metrics": 8080,
    "kuberay_probe": 8082,
}
USERS = {
    "admin": ("admin", "system:masters"),
    "dev": ("alice", "dev"),
    "controllers": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "proxy": ("system:kube-proxy", ""),
    **{f"kubelet{index}": (f"system:node:node{index}", "system:nodes") for index in range(MAX_NODES)},
    "dns": ("dns", "system:masters"),
    "kuberay": ("kuberay", "system:masters"),
}
"""Name of a kubeconfig -> user, groups. `dev` has no rights."""


@dataclass(frozen=True)
class Settings:
    """One cluster; FOLDER/cluster.json holds it."""

    level: Level
    folder: str
    programs: str
    ip: str
    ports: dict[str, int]
    tokens: dict[str, str]
    nodes: int
    mounts: list[str]
    """Paths of this machine that every container sees, read-only."""
    images: list[str]
    eviction_seconds: int
    """How long pods stay bound to a lost node (Kubernetes: 300)."""
    started: float

    @property
    def url(self) -> str:
        """Address of the API server."""
        return f"https://{self.ip}:{self.ports['server']}"

    def save(self) -> None:
        """Write FOLDER/cluster.json."""
        (Path(self.folder) / "cluster.json").write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> "Settings":
        """Read FOLDER/cluster.json."""
        return cls(**json.loads((folder / "cluster.json").read_text()))


def new_settings(level: Level, folder: Path, programs: Path, nodes: int = 1, eviction_seconds: int = 10) -> Settings:
    """A cluster in a folder that does not exist yet."""
    on_pods = level == "pods"
    return Settings(
        level=level,
        folder=str(folder),
        programs=str(programs),
        ip=NODE_IP if on_pods else "127.0.0.1",
        ports=PORTS if on_pods else dict(zip(PORTS, free_ports(len(PORTS)), strict=True)),
        tokens={user: base64.b16encode(os.urandom(16)).decode().lower() for user in USERS},
        nodes=nodes,
        mounts=mounts(programs) if on_pods else [],
        images=[str(folder / "images" / name) for name in ("pause.tar", "hostroot.tar")] if on_pods else [],
        eviction_seconds=eviction_seconds,
        started=time.time(),
    )


def mounts(programs: Path) -> list[str]:
    """What a container needs of this machine: /usr, the repository, the environment, its interpreter, the programs."""
    interpreter = Path(sys.base_prefix)
    environment = Path(sys.prefix)  # a link, in a worktree that shares it
    wanted = [Path("/usr"), ROOT, environment, environment.resolve(), interpreter, interpreter.resolve(), programs]
    return [str(path) for path in dict.fromkeys(wanted) if not set(wanted) & set(path.parents)]


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nothing listens on now, all different."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
