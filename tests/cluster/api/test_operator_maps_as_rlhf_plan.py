"""A job whose models only its own pods can read is mapped as `rlhf plan` says, or refused with what would do."""

import pytest

from rlhf_operator.resources import reader
from tests.cluster import mapped
from tests.cluster.client import Cluster
from tests.cluster.lifecycle import Document
from tests.operator.rendered import SETTINGS, example_jobs, snapshot


@pytest.fixture(scope="module")
def found(rlhf_server: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Document:
    """What the operator and `rlhf plan` said, for nodes that are large enough and for one that is not."""
    rlhf_server.make_namespace("mapped")
    try:
        return mapped.measure(rlhf_server, "mapped", tmp_path_factory.mktemp("operator"))
    finally:
        rlhf_server.drop_namespace("mapped")


def test_the_mapping_is_that_of_rlhf_plan(found: Document) -> None:
    status, plan = found["large"]["status"], mapped.by_plan(found["large"]["plan"])
    answer = mapped.by_operator(status)
    assert answer.pop("step_seconds") == pytest.approx(plan.pop("step_seconds"))
    assert answer == plan
    assert {each["uri"] for each in status["shapes"]} == {"pvc://models/llama 7b"}


def test_on_a_node_that_is_too_small_the_remedy_is_named(found: Document) -> None:
    status, infeasible = found["small"]["status"], found["small"]["plan"]["infeasible"]
    reason, message = (mapped.condition(status)[name] for name in ("reason", "message"))
    assert reason == "NoFeasiblePlacement"
    assert message.startswith(f"no mapping onto 1 node with 1 {mapped.NODES['small'][2]} fits: {infeasible['reason']}")
    (smallest,) = infeasible["smallest"]
    assert f"{smallest['gpus']} x {smallest['gpu']}" in message
    assert all(option in message for option in infeasible["options"])
    assert "would do" in message
    assert not status.get("mapping")


def test_a_claim_for_checkpoints_is_made_or_refused_as_small(found: Document) -> None:
    assert found["large"]["claim"] == "493Gi", "1.1 x 3 checkpoints of 12 bytes for each of 1.33e10 parameters"
    why = found["large"]["tight"]
    assert why.startswith("ClaimTooSmall: spec.checkpoint.storage: PersistentVolumeClaim models has ")
    assert "give it 493Gi" in why


def test_a_manifest_for_a_restricted_namespace_is_taken(rlhf_server: Cluster, namespace: str) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    rlhf_server.expect("PATCH", f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": labels}})
    job = example_jobs()["helpful-sft"]
    made = reader.manifest(snapshot(job, namespace=namespace), job, SETTINGS, [("hf://org/model", "main")])
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs?dryRun=All&fieldValidation=Strict"
    rlhf_server.expect("POST", path, made)
    pod = {"metadata": {"name": "reader"}, "spec": made["spec"]["template"]["spec"]}
    rlhf_server.expect("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All&fieldValidation=Strict", pod)
