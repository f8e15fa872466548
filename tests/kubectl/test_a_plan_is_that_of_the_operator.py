"""`kubectl rlhf plan` sees what the operator sees of the cluster."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_kubectl.kubectl import Kubectl, KubectlError
from rlhf_kubectl.plan import plan
from rlhf_operator.cluster.resources import NODES, PODS, SLICES
from rlhf_trainer.commands.cli import app
from tests.repo.tree import ROOT

MANIFEST = ROOT / "examples" / "01-helpful-ppo.yaml"
NODE = {
    "metadata": {"name": "dra", "uid": "1"},
    "status": {
        "allocatable": {"cpu": "64", "memory": "512Gi", "pods": "100"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}
SLICE = {
    "metadata": {"name": "slice", "uid": "2"},
    "spec": {"nodeName": "dra", "driver": "gpu.nvidia.com", "devices": [{"name": "gpu-0"}]},
}


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
@pytest.mark.parametrize("reason", ["", "NotFound", "Forbidden"])
def test_gpus_for_resource_claims_are_seen(
    reason: str, version: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cluster without the kind, and a user who may not list it, get a plan without them."""
    there: dict[str, list[dict[str, Any]]] = {NODES.path(): [NODE], PODS.path(): []}
    if not reason:
        there[SLICES._replace(version=version).path()] = [SLICE]

    def get(_: Kubectl, path: str) -> dict[str, Any]:
        if path in there:
            return {"items": there[path]}
        if path == "/apis/resource.k8s.io" and reason != "NotFound":
            return {"preferredVersion": {"version": version}}
        if path.startswith("/apis/resource.k8s.io"):
            raise KubectlError("refused", reason=reason)
        return {"items": []}

    monkeypatch.setattr(Kubectl, "get", get)
    without = plan(Kubectl(requested_namespace="team"), str(MANIFEST))
    told = capsys.readouterr().out
    assert ("GPUNodesUnusable" in told) is (not reason)
    assert ("helpful-ppo" in without) is (not reason)


def test_what_a_plan_of_a_mixture_guesses_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = {"cpu": "400", "memory": "4000Gi", "pods": "100", "nvidia.com/gpu": "8"}
    node = {
        "metadata": {"name": "h200", "uid": "1", "labels": {"nvidia.com/gpu.product": "NVIDIA-H200"}},
        "status": {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": gpus},
    }
    there = {NODES.path(): [node], PODS.path(): []}
    monkeypatch.setattr(Kubectl, "get", lambda _, path: {"items": there.get(path, [])})
    for experts in (1, 2):
        cut = ["--gpus", "h200=8", "--set", f"models.actor.parallelism.expert={experts}"]
        asked = CliRunner().invoke(app, ["size", "qwen3-30b-a3b", "--algorithm", "SFT", "--json", *cut])
        (tmp_path / "job.yaml").write_text(json.loads(asked.stdout)["files"]["job.yaml"]["text"])
        assert plan(Kubectl(requested_namespace="team"), str(tmp_path / "job.yaml")) == []
        told = capsys.readouterr().out
        assert ("The all-to-all of experts (actor) is predicted" in told) is (experts > 1)


def test_a_plan_of_a_file_names_the_right_to_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(_: Kubectl, path: str) -> dict[str, Any]:
        if path == NODES.path():
            raise KubectlError("the cluster refuses: nodes", reason="Forbidden")
        return {"items": []}

    monkeypatch.setattr(Kubectl, "get", get)
    with pytest.raises(KubectlError, match="the cluster refuses: nodes"):
        plan(Kubectl(requested_namespace="team"), str(MANIFEST))
