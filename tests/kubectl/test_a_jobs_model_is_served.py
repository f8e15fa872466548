"""`kubectl rlhf serve` prints a server of a language model, and its pods are not taken for those of the job."""

from typing import Any

import pytest

from rlhf_kubectl.kubectl import KubectlError
from rlhf_kubectl.serve import manifests
from rlhf_operator import names
from rlhf_operator.cluster import parse
from rlhf_operator.settings import Settings
from tests.api.cases import made


def served(base: str, uri: str = "pvc://ppo-output/ppo/model") -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifests for a job of an algorithm that has succeeded."""
    status = {"phase": "Succeeded", "image": "rlhf-trainer:1"} | ({"output": {"uri": uri}} if uri else {})
    metadata = {"name": "ppo", "namespace": "team", "uid": "u"}
    job = parse.job({"metadata": metadata, "spec": made(base)["spec"], "status": status})
    deployment, service = manifests(job, Settings(), image=None, gpus=None)
    return deployment, service


def test_a_servers_pods_are_not_the_jobs() -> None:
    """The operator forgets cached pods with the job's label that it does not list, and their GPUs would be free."""
    deployment, service = served("PPO")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert names.JOB_NAME not in labels
    assert labels[names.MANAGED_BY] != names.OPERATOR
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels


@pytest.mark.parametrize(
    ("base", "uri", "sentence"),
    [
        ("RewardModel", "pvc://c/m/model", "ppo trains no language model, as its algorithm is RewardModel"),
        ("Generate", "pvc://c/m/data", "ppo trains no language model, as its algorithm is Generate"),
        ("PPO", "", "ppo has made no model yet, it is Succeeded; kubectl rlhf why ppo"),
    ],
)
def test_a_job_without_a_language_model_is_refused(base: str, uri: str, sentence: str) -> None:
    with pytest.raises(KubectlError) as raised:
        served(base, uri)
    assert str(raised.value) == sentence
