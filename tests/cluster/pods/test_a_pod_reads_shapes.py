"""The chart with metrics over TLS, authorities and a cache of models, on real pods.

`helm test` passes, a scrape needs a certificate, and a pod under the restricted profile reads config.json from a
claim, with its last words for the operator.
"""

import asyncio
import base64
import json
import shutil
import ssl
from pathlib import Path

import aiohttp
import pytest

from tests.cluster import chart, golden_path
from tests.cluster.client import Cluster
from tests.cluster.credentials import make_authority, sign
from tests.cluster.golden_path import SFT
from tests.cluster.processes import output_of
from tests.cluster.settings import ROOT

MODEL = ROOT / "examples" / "rlhf_examples" / "helpful" / "model"
CLAIM = {
    "metadata": {"name": "models"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}
SERVER = f"{chart.RELEASE}-metrics.{chart.NAMESPACE}.svc"
SECRET = "metrics-tls"
VALUES = {
    "metrics": {"tls": {"secretName": SECRET, "requireClientCertificate": True}},
    "caBundle": {"configMap": "kube-root-ca.crt"},  # that of the API server, which Kubernetes puts into each namespace
    "trainer": {"modelCache": {"emptyDir": {}}},
}


@pytest.fixture(scope="module")
def pki(pods_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of the metrics and of who may read them; the chart is installed with them."""
    folder = tmp_path_factory.mktemp("pki")
    make_authority(folder)
    sign(folder, "tls", "/CN=metrics", f"subjectAltName=DNS:{SERVER}")
    sign(folder, "client", "/CN=prometheus", "extendedKeyUsage=clientAuth")
    files = ("tls.crt", "tls.key", "ca.crt")
    data = {name: base64.b64encode((folder / name).read_bytes()).decode() for name in files}
    objects = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": chart.NAMESPACE}},
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/tls",
            "metadata": {"name": SECRET, "namespace": chart.NAMESPACE},
            "data": data,
        },
    ]
    made = {"apiVersion": "v1", "kind": "List", "items": objects}
    pods_cluster.kubectl("apply", "-f", "-", text=json.dumps(made))
    chart.install(pods_cluster, VALUES)
    return folder


@pytest.mark.usefixtures("pki")
def test_helm_test_passes(pods_cluster: Cluster) -> None:
    own = ["--namespace", chart.NAMESPACE, "--timeout", "120s"]
    helm = [pods_cluster.programs / "helm", "test", chart.RELEASE, *own]
    said = output_of("sh", "-c", '"$@" 2>&1', "sh", *helm, environment=pods_cluster.environment())
    assert "/readyz: ok\n" in said
    pods = pods_cluster.items(f"/api/v1/namespaces/{chart.NAMESPACE}/pods")
    assert not [each for each in pods if each["metadata"]["name"].endswith("-ready")], "it has done its work"


def test_a_scrape_over_tls_needs_a_certificate(pods_cluster: Cluster, pki: Path) -> None:
    service = f"/api/v1/namespaces/{chart.NAMESPACE}/services/{chart.RELEASE}-metrics"
    address = pods_cluster.expect("GET", service)["spec"]["clusterIP"]
    context = ssl.create_default_context(cafile=str(pki / "ca.crt"))

    async def scraped() -> str:
        url = f"https://{address}:9090/metrics"
        async with (
            aiohttp.ClientSession() as session,
            session.get(url, ssl=context, server_hostname=SERVER) as answer,
        ):
            return await answer.text()

    with pytest.raises((aiohttp.ClientError, OSError)):
        asyncio.run(scraped())
    context.load_cert_chain(pki / "client.crt", pki / "client.key")
    assert "\nrlhf_operator_leader 1.0\n" in asyncio.run(scraped())


@pytest.mark.usefixtures("pki")
def test_a_model_on_a_claim_is_mapped_by_its_config(pods_cluster: Cluster, pods_namespace: str) -> None:
    pods_cluster.offer_volumes(2)
    pods_cluster.expect("PATCH", f"/api/v1/namespaces/{pods_namespace}", chart.RESTRICTED)
    pods_cluster.expect("POST", f"/api/v1/namespaces/{pods_namespace}/persistentvolumeclaims", CLAIM)
    shutil.copytree(MODEL, pods_cluster.folder_of_claim(pods_namespace, "models") / "tiny")
    job = golden_path.example()[SFT]
    job["spec"]["models"]["actor"]["uri"] = "pvc://models/tiny"
    golden_path.apply(pods_cluster, pods_namespace, {SFT: job})
    found = golden_path.until(pods_cluster, pods_namespace, SFT, lambda status: status.get("mapping"), 300)
    (shape,) = found["shapes"]
    assert shape["uri"] == "pvc://models/tiny"
    assert shape["shape"]["numHiddenLayers"] > 0
    (mapped,) = (each for each in found["conditions"] if each["type"] == "Mapped")
    assert mapped["reason"] == "Mapped"
    assert found["mapping"]["predictedStepSeconds"] > 0

    def running() -> list[str]:
        heads = golden_path.pods(pods_cluster, pods_namespace, SFT, golden_path.HEAD)
        return [each["metadata"]["name"] for each in heads if each["status"]["phase"] == "Running"]

    (head,) = pods_cluster.until(running, 120, "the head pod runs")
    script = 'test -w "$HF_HUB_CACHE" && head -1 "$SSL_CERT_FILE"'
    said = pods_cluster.kubectl("exec", "--namespace", pods_namespace, head, "-c", "ray-head", "--", "sh", "-c", script)
    assert said == "-----BEGIN CERTIFICATE-----\n"
    pods_cluster.kubectl("delete", "rlhf", SFT, "--namespace", pods_namespace)
