"""`watch.causes: Pause` on real pods: a reward that is always 0 suspends the job, and `kubectl rlhf resume` ends it."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.cluster import chart, golden_path
from tests.cluster.client import Cluster
from tests.cluster.plugin import told
from tests.cluster.pods.test_a_pod_reads_shapes import CLAIM
from tests.cluster.settings import ROOT

JOB, STEPS, LOOK_STEPS = "constant", 12, 5
MODEL = ROOT / "examples" / "rlhf_examples" / "arithmetic" / "model"


def job() -> golden_path.Document:
    """A verifier that compares answers with the wrong column."""
    spec = {
        "algorithm": {"name": "GRPO", "kl": {"coefficient": 0.0}},
        "models": {
            "actor": {"uri": "pvc://models/tiny", "optimizer": {"learningRate": 1e-4}},
            "reward": {"verifier": {"name": "Math", "answerKey": "prompt"}},
        },
        "data": {
            "train": {"uri": "package://rlhf_examples/arithmetic/train.jsonl"},
            "maxPromptTokens": 8,
            "maxResponseTokens": 4,
        },
        "rollout": {"samplesPerPrompt": 4, "keep": 1.0},
        "training": {"totalSteps": STEPS, "promptBatchSize": 4},
        "resources": {"device": "CPU", "slotsPerNode": 1},
        "watch": {"causes": "Pause"},
    }
    return {"apiVersion": "rlhf.hybridflow.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": JOB}, "spec": spec}


@pytest.mark.slow
def test_a_constant_reward_pauses_the_job(pods_cluster: Cluster, pods_namespace: str) -> None:
    chart.install(pods_cluster)
    pods_cluster.offer_volumes(2)
    pods_cluster.expect("POST", f"/api/v1/namespaces/{pods_namespace}/persistentvolumeclaims", CLAIM)
    folder = pods_cluster.folder_of_claim(pods_namespace, "models") / "tiny"
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL)).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    golden_path.apply(pods_cluster, pods_namespace, {JOB: job()})
    paused = golden_path.until(pods_cluster, pods_namespace, JOB, lambda found: found.get("phase") == "Suspended", 300)
    (healthy,) = (each for each in paused["conditions"] if each["type"] == "Healthy")
    assert healthy["status"] == "False"
    assert "ConstantReward" in {cause.split()[0] for cause in paused["causes"]}
    assert golden_path.saved_step(paused) == golden_path.step(paused) == LOOK_STEPS
    assert f"kubectl rlhf resume {JOB}" in told(pods_cluster, "why", JOB, "-n", pods_namespace)
    told(pods_cluster, "resume", JOB, "-n", pods_namespace)
    ended = golden_path.succeeded(pods_cluster, pods_namespace, JOB)
    assert golden_path.step(ended) == STEPS
    assert ended.get("failedAttempts", 0) == 0
