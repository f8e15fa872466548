"""What this machine lacks for a test cluster, and whether that is an error."""

import os
import shutil
from pathlib import Path

PODS_PROGRAMS = {
    "/usr/bin/containerd": "containerd",
    "/usr/bin/ctr": "containerd",
    "/usr/sbin/runc": "runc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
}
PODS_COMMANDS = {"nft": "nftables", "ip": "iproute2", "unshare": "util-linux", "mount": "mount", "wget": "wget"}
NEEDED_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


def required() -> bool:
    """True where a test of the cluster must not be skipped (RLHF_CLUSTER_TESTS=required; CI sets it)."""
    return os.environ.get("RLHF_CLUSTER_TESTS") == "required"


def api_cannot_run() -> str:
    """Why level api cannot run here, as one sentence; empty if it can."""
    if not shutil.which("openssl"):
        return "the test cluster needs openssl for its certificates; install the package openssl"
    return ""


def pods_cannot_run() -> str:
    """Why level pods cannot run here, as one sentence; empty if it can."""
    if os.geteuid() != 0:
        return "a test cluster with pods needs root"
    held = effective_capabilities()
    if lacking := [name for name, bit in NEEDED_CAPABILITIES.items() if not held >> bit & 1]:
        return f"a test cluster with pods needs {' and '.join(lacking)}"
    absent = {package for path, package in PODS_PROGRAMS.items() if not Path(path).exists()}
    absent |= {package for command, package in PODS_COMMANDS.items() if not shutil.which(command)}
    if absent:
        return f"a test cluster with pods needs the packages {', '.join(sorted(absent))}"
    if not os.access("/sys/fs/cgroup", os.W_OK):
        return "a test cluster with pods needs a writable /sys/fs/cgroup"
    return api_cannot_run()


def effective_capabilities() -> int:
    """The capabilities of this process, a bit each."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines["CapEff"], 16)
