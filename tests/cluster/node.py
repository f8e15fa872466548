"""PID 1 of a node: runs in new network, mount and PID namespaces and starts the node's programs.

Node 0 also has the control plane, DNS and KubeRay. When this process ends, the kernel ends all of the node.
"""

import json
import os
import resource
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from tests.cluster.control_plane import ControlPlane
from tests.cluster.node_files import CONTAINERD, CTR, RUN, SNAPSHOTTER, SOCKET, node_ip
from tests.cluster.processes import Processes, output_of
from tests.cluster.settings import NODE_IP, SERVICE_NET, Settings

OWN_FOLDERS = ("/run", "/var/log", "/var/lib/cni")
KERNEL_SETTINGS = {
    "vm.overcommit_memory": 1,
    "vm.panic_on_oom": 0,
    "kernel.panic": 10,
    "kernel.panic_on_oops": 1,
    "kernel.keys.root_maxkeys": 1000000,
    "kernel.keys.root_maxbytes": 25000000,
}
"""What the kubelet insists on. They belong to the whole machine, so the node sees files that say so."""


def run_node(folder: Path, index: int) -> None:
    """Be node `index` of the cluster in a folder until SIGTERM."""
    settings = Settings.load(folder)
    mount(folder / f"node{index}")
    network(index)
    processes = Processes(RUN, Path(settings.programs))
    plane = ControlPlane(settings, processes)
    plane.mark("namespaces")
    start_containerd(processes)
    if index == 0:
        plane.start()
    import_images(settings, processes)
    plane.mark("images")
    start_kubelet(processes, index)
    if index == 0:
        processes.start("coredns", "-conf", f"{RUN}/conf/Corefile")
        plane.start_kuberay()
        processes.until("DNS", lambda: plane.answers(f"http://{NODE_IP}:8181/ready"))
        plane.wait_for_accounts()
        plane.mark("services")
    (RUN / "up.json").write_text(json.dumps(plane.times))
    reap(processes)


def mount(home: Path) -> None:
    """The node's own folders, over those of the machine."""
    for path in OWN_FOLDERS:
        Path(path).mkdir(parents=True, exist_ok=True)
    output_of("mount", "--make-rshared", "/")
    for path in OWN_FOLDERS:
        output_of("mount", "-t", "tmpfs", "tmpfs", path)
    for folder in (RUN, Path("/run/containerd"), Path("/run/netns"), Path("/var/log/pods")):
        folder.mkdir(parents=True)
    output_of("mount", "--bind", home, RUN)
    for name, value in KERNEL_SETTINGS.items():
        file = Path("/run", name)
        file.write_text(f"{value}\n")
        output_of("mount", "--bind", file, Path("/proc/sys", *name.split(".")))
    resolver = Path("/etc/resolv.conf")
    if resolver.exists():
        output_of("mount", "--bind", RUN / "conf/resolv.conf", resolver.resolve())


def network(index: int) -> None:
    """Addresses and routes of the node; its eth0 comes from outside."""
    output_of("ip", "link", "set", "lo", "up")
    while subprocess.run(["ip", "link", "show", "eth0"], capture_output=True, check=False).returncode:
        time.sleep(0.02)
    output_of("ip", "addr", "add", f"{node_ip(index)}/30", "dev", "eth0")
    output_of("ip", "link", "set", "eth0", "up")
    if index:
        output_of("ip", "route", "add", "default", "via", f"10.250.{index}.1")  # node 0, which has no default route
    # A route must exist before kube-proxy's DNAT; not every kernel has a dummy device, so it goes into a veth pair.
    output_of("ip", "link", "add", "svc0", "type", "veth", "peer", "name", "svc1")
    output_of("ip", "link", "set", "svc0", "up")
    output_of("ip", "link", "set", "svc1", "up")
    output_of("ip", "route", "add", SERVICE_NET, "dev", "svc0", "src", node_ip(index))
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")  # of this network namespace only


def start_containerd(processes: Processes) -> None:
    """With a base specification that gives every container the machine's programs."""
    specification = json.loads(output_of(CTR, "oci", "spec"))
    specification["mounts"] += json.loads((RUN / "conf/mounts.json").read_text())
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # without CAP_SYS_RESOURCE nobody can go above
    specification["process"]["rlimits"] = [{"type": "RLIMIT_NOFILE", "hard": hard, "soft": hard}]
    (RUN / "conf/base-spec.json").write_text(json.dumps(specification))
    # The shim must be of containerd's own version.
    path = {"PATH": f"{CONTAINERD.parent}:{os.environ['PATH']}"}
    arguments = ("--config", f"{RUN}/conf/containerd.toml", "--log-level", "info")
    processes.start("containerd", *arguments, program=CONTAINERD, environment=path)


def import_images(settings: Settings, processes: Processes) -> None:
    """Hand the images to containerd as soon as it answers."""
    client = (CTR, "-a", SOCKET, "-n", "k8s.io")
    processes.until("containerd", lambda: output_of(*client, "version"))
    for archive in settings.images:
        output_of(*client, "images", "import", "--snapshotter", SNAPSHOTTER, archive)


def start_kubelet(processes: Processes, index: int) -> None:
    """The kubelet, and kube-proxy."""
    processes.start(
        "kubelet",
        f"--config={RUN}/conf/kubelet.yaml",
        f"--kubeconfig={RUN}/kubelet{index}.kubeconfig",
        f"--hostname-override=node{index}",
        f"--node-ip={node_ip(index)}",
        f"--root-dir={RUN}/kubelet",
        f"--cert-dir={RUN}/kubelet-pki",
        "--v=2",
    )
    processes.start("kube-proxy", f"--config={RUN}/conf/proxy.yaml", "--v=1")


def reap(processes: Processes) -> None:
    """Until SIGTERM: collect what containers leave behind, obey tests, note a program that ended in ended.log."""
    asked_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda received, _frame: asked_to_end.append(received))
    while not asked_to_end:
        processes.obey()
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            time.sleep(0.1)
        elif name := processes.name_of(ended.si_pid):
            code = processes.running.pop(name).wait()
            with (RUN / "ended.log").open("a") as log:
                log.write(f"{name} ended with {code}\n")
        else:
            with suppress(ChildProcessError):
                os.waitpid(ended.si_pid, 0)
