"""An own algorithm and environment train on real pods; their code is in a ConfigMap, as docs/extending.md says."""

import json
import re
import shutil
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_api import kubectl_yaml
from rlhf_trainer.init_command import PROJECT
from tests.cluster import chart, golden_path
from tests.cluster.client import Cluster
from tests.cluster.pods.test_a_pod_reads_shapes import CLAIM, MODEL
from tests.cluster.settings import ROOT

pytestmark = pytest.mark.timeout(900)

NAME = "better-half"
FILES = (PROJECT / "better_half.py", ROOT / "examples" / "own" / "words.py")
PAGE = (ROOT / "docs" / "extending.md").read_text()


def runtime_of_the_page() -> dict[str, Any]:
    """What the page says of pods that have the code."""
    (shown,) = re.findall(r"^```yaml\n(runtime:\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (document,) = kubectl_yaml.read(shown, "")
    return dict(document["runtime"])


@pytest.fixture
def job() -> dict[str, Any]:
    """Two steps of the project's algorithm, from weights at random, on episodes of the game of words."""
    (found,) = (
        each for each in kubectl_yaml.read((PROJECT / "job.yaml").read_text(), "") if each["metadata"]["name"] == NAME
    )
    spec = found["spec"]
    spec["models"] = {"actor": {**spec["models"]["actor"], "uri": "pvc://models/tiny"}}
    spec["rollout"] |= {"environment": {"entrypoint": "words:Words", "arguments": {"wanted": 2}}, "maxTurns": 3}
    spec["data"] |= {"maxResponseTokens": 192}  # an answer ends by one token of 512, and only then another one follows
    spec["training"] = {"totalSteps": 2, "promptBatchSize": 8}
    return {**found, "spec": {**spec, "runtime": runtime_of_the_page()}}


def test_an_own_algorithm_trains_on_an_own_environment(
    pods_cluster: Cluster, pods_namespace: str, job: dict[str, Any]
) -> None:
    chart.install(pods_cluster)
    pods_cluster.offer_volumes(2)
    pods_cluster.expect("POST", f"/api/v1/namespaces/{pods_namespace}/persistentvolumeclaims", CLAIM)
    model = pods_cluster.folder_of_claim(pods_namespace, "models") / "tiny"
    shutil.copytree(MODEL, model)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    (model / "model.safetensors").chmod(0o644)  # it is made for its owner alone, and pods are not root
    files = [f"--from-file={path}" for path in FILES]
    pods_cluster.kubectl("create", "configmap", "my-code", *files, "-n", pods_namespace)
    golden_path.apply(pods_cluster, pods_namespace, {NAME: job})
    ended = golden_path.succeeded(pods_cluster, pods_namespace, NAME)
    assert "advantage.compute_advantage" in json.dumps(ended["step"]), "a pod has read the step"
    folder = pods_cluster.folder_of_claim(pods_namespace, f"{NAME}-output") / NAME
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in steps] == [1, 2]
    assert all(each["episodes/failed"] == 0 and each["episodes/turns"] > 1 for each in steps)
    assert all(each["reward/mean"] != 0 for each in steps), "only the game rewards"
    assert (folder / "algorithm-from-000001.py").read_text() == FILES[0].read_text()
