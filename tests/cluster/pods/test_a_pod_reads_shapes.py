"""A real pod under the restricted profile reads config.json from a claim, and its last words reach the operator."""

import shutil

import pytest

from tests.cluster import chart, golden_path
from tests.cluster.client import Cluster
from tests.cluster.golden_path import SFT
from tests.cluster.settings import ROOT

pytestmark = pytest.mark.timeout(900)

MODEL = ROOT / "examples" / "rlhf_examples" / "helpful" / "model"
CLAIM = {
    "metadata": {"name": "models"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}
RESTRICTED = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}


def test_a_model_on_a_claim_is_mapped_by_its_config(pods_cluster: Cluster, pods_namespace: str) -> None:
    chart.install(pods_cluster)
    pods_cluster.offer_volumes(2)
    pods_cluster.expect("PATCH", f"/api/v1/namespaces/{pods_namespace}", RESTRICTED)
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
    pods_cluster.kubectl("delete", "rlhf", SFT, "--namespace", pods_namespace)
