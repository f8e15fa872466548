"""The programs that decide: etcd, API server, controllers, scheduler, and KubeRay."""

import ssl
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.client import Cluster
from tests.cluster.processes import Processes, output_of
from tests.cluster.settings import DOCUMENTATION_IP, NODE_IP, SERVICE_NET, Settings

UNUSED_CONTROLLERS = [
    "node-ipam-controller",
    "cloud-node-lifecycle-controller",
    "service-lb-controller",
    "node-route-controller",
    "persistentvolume-attach-detach-controller",
    "bootstrap-signer-controller",
    "token-cleaner-controller",
]
NEED_KUBELETS = ["node-lifecycle-controller", "endpoints-controller", "endpointslice-controller"]
"""Controllers that level api is better without: nobody renews the lease of its made-up node, and the addresses of its
pods are of the loopback, which endpoints must not be: they were tried again and again, a fifth of all requests."""
MEMORY_FOR_TIME = {"GOGC": "400"}
"""Go collects garbage when there is four times as much of it as of the rest."""
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DEFINITIONS = ("rayclusters", "rayjobs", "rayservices")
"""What KubeRay watches; its RayCronJob is behind a feature gate."""
VERSION = "v1"
"""The version that KubeRay reads and writes. The older one is of the same size, and nobody asks for it."""


class ControlPlane:
    """Starts the programs in a folder that has the credentials, and notes when each was ready."""

    def __init__(self, settings: Settings, processes: Processes) -> None:
        self.settings = settings
        self.processes = processes
        self.folder = processes.folder
        self.pki = processes.folder / "pki"
        self.times: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Note that a part is ready, in seconds since the cluster was asked for."""
        self.times[name] = round(time.time() - self.settings.started, 2)

    def start(self) -> None:
        """All but KubeRay."""
        self._etcd()
        self.mark("etcd")
        self._api_server()
        self.processes.until("the API server", lambda: self.answers(f"{self.settings.url}/readyz"))
        self.mark("apiserver")
        self._controllers()
        self._scheduler()

    def start_kuberay(self) -> None:
        """KubeRay's own definitions and operator."""
        cluster = Cluster(Path(self.settings.folder))
        for name in DEFINITIONS:
            # Less work for the server than `kubectl apply --server-side`: these megabytes keep it busy for seconds.
            text = (self.processes.programs / "kuberay-crds" / f"ray.io_{name}.yaml").read_text()
            definition = yaml.load(text, yaml.CSafeLoader)
            spec = definition["spec"]
            spec["versions"] = [each for each in spec["versions"] if each["name"] == VERSION]
            cluster.expect("POST", CRDS, definition)
        self.processes.until("KubeRay's definitions", lambda: all(map(_established, cluster.items(CRDS))))
        ip, ports = self.settings.ip, self.settings.ports
        self.processes.start(
            "kuberay-operator",
            f"--kubeconfig={self.folder}/kuberay.kubeconfig",
            "--enable-leader-election=false",
            "--reconcile-concurrency=10",  # one worker waits for seconds for each head that does not answer
            f"--metrics-addr={ip}:{ports['kuberay_metrics']}",
            f"--health-probe-bind-address={ip}:{ports['kuberay_probe']}",
            "--log-stdout-encoder=console",
            environment=MEMORY_FOR_TIME,
        )
        self.processes.until("KubeRay", lambda: self.answers(f"http://{ip}:{ports['kuberay_probe']}/readyz"))
        self.mark("kuberay")

    def wait_for_accounts(self) -> None:
        """Until a pod can be made in the namespace default."""
        account = ("get", "serviceaccount", "default")
        self.processes.until("the default service account", lambda: self.kubectl(*account))

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl as the administrator."""
        program = self.processes.programs / "kubectl"
        cache = {"KUBECACHEDIR": str(self.folder / "kubectl-cache")}
        return output_of(program, f"--kubeconfig={self.folder}/admin.kubeconfig", *arguments, environment=cache)

    def answers(self, url: str) -> bool:
        """True if an address answers 200 to the administrator."""
        headers = {"Authorization": f"Bearer {self.settings.tokens['admin']}"}
        trust = ssl.create_default_context(cafile=str(self.pki / "ca.crt")) if url.startswith("https") else None
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), context=trust, timeout=2) as answer:
            return bool(answer.status == 200)

    def _etcd(self) -> None:
        client, peer = (f"http://127.0.0.1:{self.settings.ports[name]}" for name in ("etcd", "etcd_peer"))
        self.processes.start(
            "etcd",
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
            environment=MEMORY_FOR_TIME,
        )
        self.processes.until("etcd", lambda: self.answers(f"{client}/health"))

    def _api_server(self) -> None:
        settings, pki = self.settings, self.pki
        self.processes.start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{settings.ports['etcd']}",
            f"--bind-address={settings.ip}",
            f"--advertise-address={NODE_IP if settings.level == 'pods' else DOCUMENTATION_IP}",
            f"--secure-port={settings.ports['server']}",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--client-ca-file={pki}/ca.crt",
            f"--token-auth-file={self.folder}/tokens.csv",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--service-cluster-ip-range={SERVICE_NET}",
            "--allow-privileged=true",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki}/sa.key",
            f"--service-account-signing-key-file={pki}/sa.key",
            f"--kubelet-client-certificate={pki}/kubelet-client.crt",
            f"--kubelet-client-key={pki}/kubelet-client.key",
            "--kubelet-preferred-address-types=InternalIP",
            "--profiling=false",
            f"--default-not-ready-toleration-seconds={settings.eviction_seconds}",
            f"--default-unreachable-toleration-seconds={settings.eviction_seconds}",
            "--v=1",
            # It has much to throw away when it starts, and starts several times: it collects garbage from 2 GiB on.
            environment={"GOGC": "off", "GOMEMLIMIT": "2GiB"},
        )

    def _controllers(self) -> None:
        unused = UNUSED_CONTROLLERS + (NEED_KUBELETS if self.settings.level == "api" else [])
        self.processes.start(
            "kube-controller-manager",
            f"--kubeconfig={self.folder}/controllers.kubeconfig",
            "--leader-elect=false",
            "--use-service-account-credentials=true",
            f"--controllers={','.join(['*', *(f'-{name}' for name in unused)])}",
            f"--service-account-private-key-file={self.pki}/sa.key",
            f"--root-ca-file={self.pki}/ca.crt",
            f"--cluster-signing-cert-file={self.pki}/ca.crt",
            f"--cluster-signing-key-file={self.pki}/ca.key",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.settings.ports['controllers']}",
            f"--cert-dir={self.folder}/controllers",
            "--node-monitor-grace-period=20s",
            "--pvclaimbinder-sync-period=1s",  # a claim that is made with its volume may have missed it
            "--profiling=false",
            "--v=1",
            environment=MEMORY_FOR_TIME,
        )

    def _scheduler(self) -> None:
        self.processes.start(
            "kube-scheduler",
            f"--kubeconfig={self.folder}/scheduler.kubeconfig",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.settings.ports['scheduler']}",
            f"--cert-dir={self.folder}/scheduler",
            "--profiling=false",
            "--v=1",
            environment=MEMORY_FOR_TIME,
        )


def _established(definition: Mapping[str, Any]) -> bool:
    conditions = definition.get("status", {}).get("conditions") or []  # null at first
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)
