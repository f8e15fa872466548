"""Jobs on claims that know no fsGroup, as those of NFS: their pods are not root, and make the run folder themselves."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import chart, golden_path
from tests.cluster.attack import CLAIM
from tests.cluster.client import Cluster
from tests.cluster.golden_path import SFT

pytestmark = pytest.mark.slow

USER = 1000
"""The user of a job's pods."""


def folder_of(cluster: Cluster, namespace: str, claim: str, owner: int) -> Path:
    """The root of a new claim into which its owner alone may write."""
    made = {**CLAIM, "metadata": {"name": claim}}
    cluster.expect("POST", f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", made)
    root = cluster.folder_of_claim(namespace, claim)
    os.chown(root, owner, owner)
    root.chmod(0o755)
    return root


def job(name: str, claim: str) -> dict[str, Any]:
    """Two steps of SFT with the run folder on a claim."""
    (made,) = golden_path.shortened({SFT: 2}, every_steps=2).values()
    made["metadata"]["name"] = name
    made["spec"]["checkpoint"]["storage"] = f"pvc://{claim}/team/runs"
    made["spec"]["runPolicy"]["backoffLimit"] = 0
    return made


def test_its_pods_make_the_run_folder_or_say_why_not(pods_cluster: Cluster, pods_namespace: str) -> None:
    chart.install(pods_cluster)
    pods_cluster.expect("PATCH", f"/api/v1/namespaces/{pods_namespace}", chart.RESTRICTED)
    pods_cluster.offer_volumes(2)
    root = folder_of(pods_cluster, pods_namespace, "own", USER)
    folder_of(pods_cluster, pods_namespace, "foreign", 0)
    jobs = {name: job(name, claim) for name, claim in (("refused", "foreign"), ("writes", "own"))}
    golden_path.apply(pods_cluster, pods_namespace, jobs)
    failed = golden_path.until(
        pods_cluster, pods_namespace, "refused", lambda found: found.get("phase") == "Failed", 300
    )["lastFailure"]
    assert failed["reason"] == "Environment"
    told = "spec.checkpoint.storage: user 1000:1000 may not write to folder team/runs/refused of claim foreign (mkdir: "
    assert failed["message"].startswith(told), failed
    ended = golden_path.succeeded(pods_cluster, pods_namespace, "writes")
    assert ended["output"]["uri"] == "pvc://own/team/runs/writes/writes/model"
    model = root / "team/runs/writes/writes/model/model.safetensors"
    assert model.stat().st_uid == (root / "team").stat().st_uid == USER
