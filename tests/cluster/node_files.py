"""The configuration of a node's programs."""

import json
import shutil
import sys
from pathlib import Path

from tests.cluster.images import HOSTROOT
from tests.cluster.settings import CGROUP, NODE_IP, POD_NET, Settings

RUN = Path("/run/tc")
"""FOLDER/node<i> is mounted there in the node: paths of unix sockets stay short."""
CONTAINERD, CTR = Path("/usr/bin/containerd"), Path("/usr/bin/ctr")
SOCKET = "/run/containerd/containerd.sock"
SNAPSHOTTER = "overlayfs"

CONTAINERD_TOML = f"""version = 2
root = "{RUN}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.nri.v1.nri"]
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:test"
  disable_apparmor = true
  restrict_oom_score_adj = true  # without CAP_SYS_RESOURCE the kubelet's -998 is refused
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{RUN}/conf/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{SNAPSHOTTER}"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{RUN}/conf/base-spec.json"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
        BinaryName = "{RUN}/conf/runc"
"""
RUNC = f"""#!/bin/sh
case " $* " in *" create "*) {sys.executable} -SE {RUN}/conf/sort_mounts.py "$@" || exit 1 ;; esac
exec /usr/sbin/runc "$@"
"""
# An image that was built has programs of its own. The machine's folders come first in the specification; a pod's own
# /tmp would hide a repository below that.
SORT_MOUNTS = f"""import json, sys
path = sys.argv[sys.argv.index("--bundle") + 1] + "/config.json"
with open(path) as file:
    specification = json.load(file)
with open("{RUN}/conf/mounts.json") as file:
    of_the_machine = [mount["destination"] for mount in json.load(file)]
if specification.get("annotations", {{}}).get("io.kubernetes.cri.image-name") != "{HOSTROOT}":
    specification["mounts"] = [each for each in specification["mounts"] if each["destination"] not in of_the_machine]
specification["mounts"].sort(key=lambda mount: mount["destination"].count("/"))
with open(path, "w") as file:
    json.dump(specification, file)
"""
# Two blocks: inside one, the template would answer before kubernetes.
COREFILE = f"""cluster.local:53 in-addr.arpa:53 {{
    bind {NODE_IP}
    errors
    ready {NODE_IP}:8181
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {RUN}/dns.kubeconfig
        pods insecure
        ttl 1
    }}
}}
.:53 {{
    bind {NODE_IP}
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""
RESOLV_CONF = f"nameserver {NODE_IP}\nsearch svc.cluster.local cluster.local\noptions ndots:5\n"


def node_ip(index: int) -> str:
    """Address of a node."""
    return f"10.250.{index}.2"


def write_node_files(settings: Settings, index: int) -> None:
    """FOLDER/node<i> with credentials and configuration; what an earlier node of that number left is gone."""
    folder = Path(settings.folder)
    home = folder / f"node{index}"
    shutil.rmtree(home, ignore_errors=True)
    configuration = home / "conf"
    (configuration / "cni").mkdir(parents=True)
    shutil.copytree(folder / "pki", home / "pki")
    own = [folder / "proxy.kubeconfig", folder / f"kubelet{index}.kubeconfig"]
    for file in [folder / "tokens.csv", *folder.glob("*.kubeconfig")] if index == 0 else own:
        shutil.copy(file, home)
    documents = {
        "cni/10-pods.conflist": _network(index),
        "kubelet.yaml": _kubelet(index),
        "proxy.yaml": _proxy(index),
        "mounts.json": [_mount(path) for path in settings.mounts],
    }
    for name, document in documents.items():
        (configuration / name).write_text(json.dumps(document))
    (configuration / "containerd.toml").write_text(CONTAINERD_TOML)
    (configuration / "runc").write_text(RUNC)
    (configuration / "runc").chmod(0o755)
    (configuration / "sort_mounts.py").write_text(SORT_MOUNTS)
    (configuration / "Corefile").write_text(COREFILE)
    (configuration / "resolv.conf").write_text(RESOLV_CONF)


def _mount(path: str) -> dict[str, object]:
    return {"destination": path, "source": path, "type": "bind", "options": ["rbind", "ro", "nosuid", "rprivate"]}


def _network(index: int) -> dict[str, object]:
    addresses = {
        "type": "host-local",
        "dataDir": f"{RUN}/cni-ipam",
        "ranges": [[{"subnet": f"10.244.{index}.0/24"}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    plugins = [
        {"type": "ptp", "ipMasq": False, "mtu": 1500, "ipam": addresses},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}


def _kubelet(index: int) -> dict[str, object]:
    low = ("nodefs.available", "imagefs.available", "nodefs.inodesFree", "imagefs.inodesFree")
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node_ip(index),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{RUN}/pki/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"{CGROUP}{index}",
        "clusterDNS": [NODE_IP],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "cpuCFSQuota": False,  # all pods share the few CPUs of this machine; nobody is to wait while one is idle
        "evictionHard": {"memory.available": "100Mi", **dict.fromkeys(low, "1%")},
        "failCgroupV1": False,
        "failSwapOn": False,
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "localStorageCapacityIsolation": True,
        "maxPods": 60,
        "nodeLeaseDurationSeconds": 20,
        "nodeStatusReportFrequency": "30s",
        "nodeStatusUpdateFrequency": "5s",
        "podLogsDir": "/var/log/pods",
        "protectKernelDefaults": True,
        "registerNode": True,
        "resolvConf": "",
        "shutdownGracePeriod": "0s",
        "syncFrequency": "10s",
        "volumePluginDir": f"{RUN}/volume-plugins",
    }


def _proxy(index: int) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "bindAddress": node_ip(index),
        "clientConnection": {"kubeconfig": f"{RUN}/proxy.kubeconfig"},
        "clusterCIDR": POD_NET,
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "healthzBindAddress": "127.0.0.1:10256",
        "hostnameOverride": f"node{index}",
        "metricsBindAddress": "127.0.0.1:10249",
        "nftables": {"minSyncPeriod": "100ms"},
    }
