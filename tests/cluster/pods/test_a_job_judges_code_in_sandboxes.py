"""GRPO on real pods with the verifier Code in sandboxes: 64 responses a step; a pod is killed, and none is left."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlhf_operator import names
from tests.cluster import chart, golden_path
from tests.cluster.client import Cluster
from tests.cluster.plugin import told
from tests.cluster.pods.test_a_pod_reads_shapes import CLAIM, MODEL
from tests.cluster.processes import FailedError

JOB, STEPS, WARM = "coder", 2, 8
RIGHT, WRONG = "def f(): return 1\n", "def f(): return 2\n"
TESTS = "import time\ntime.sleep(3)\nassert f() == 1"
"""Tests that take a while, in which a pod can be killed."""


def job() -> dict[str, Any]:
    """Two steps of 64 responses, each a right or a wrong program."""
    spec = {
        "algorithm": {"name": "GRPO", "kl": {"coefficient": 0.0}},
        "models": {
            "actor": {"uri": "pvc://models/tiny", "optimizer": {"learningRate": 1e-3}},
            "reward": {"verifier": {"name": "Code"}, "timeoutSeconds": 600},
        },
        "data": {"train": {"uri": "pvc://models/rows.jsonl"}, "maxPromptTokens": 8, "maxResponseTokens": 16},
        "rollout": {"samplesPerPrompt": 8, "keep": 1.0},
        "training": {"totalSteps": STEPS, "promptBatchSize": 8},
        "resources": {"device": "CPU", "slotsPerNode": 1},
        "sandbox": {"cpu": "50m", "memory": "192Mi", "warm": WARM},
    }
    return {"apiVersion": "rlhf.hybridflow.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": JOB}, "spec": spec}


def write_model(folder: Path) -> None:
    """A model that writes nothing but the two programs, each in a third of the cases, or else ends its answer."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_tokens([RIGHT, WRONG])
    tokenizer.save_pretrained(folder)
    config = AutoConfig.from_pretrained(MODEL, vocab_size=len(tokenizer), tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weights.zero_()
        model.get_input_embeddings().weight.fill_(1.0)
        head = model.get_output_embeddings().weight.fill_(0.0)
        ids = [tokenizer.eos_token_id, *map(tokenizer.convert_tokens_to_ids, (RIGHT, WRONG))]
        head[ids] = 20.0 / config.hidden_size
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def sandboxes(cluster: Cluster, namespace: str, phase: str = "Running") -> list[golden_path.Document]:
    return [
        pod for pod in golden_path.pods(cluster, namespace, JOB, names.SANDBOX) if pod["status"].get("phase") == phase
    ]


def is_busy(cluster: Cluster, namespace: str, pod: golden_path.Document) -> bool:
    """Whether the code of a response is judged in a sandbox: it holds the judge's modules, and has not ended."""
    name = pod["metadata"]["name"]
    try:
        return "rlhf_trainer" in cluster.kubectl("exec", "-n", namespace, name, "--", "ls", "/tmp")
    except FailedError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_job_judges_code_in_sandboxes(pods_cluster: Cluster, pods_namespace: str) -> None:
    chart.install(pods_cluster)
    pods_cluster.offer_volumes(2)
    pods_cluster.expect("POST", f"/api/v1/namespaces/{pods_namespace}/persistentvolumeclaims", CLAIM)
    claim = pods_cluster.folder_of_claim(pods_namespace, "models")
    write_model(claim / "tiny")
    rows = [{"prompt": f"{number}", "tests": TESTS} for number in range(16)]
    (claim / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    golden_path.apply(pods_cluster, pods_namespace, {JOB: job()})

    def used() -> list[golden_path.Document]:
        return [pod for pod in sandboxes(pods_cluster, pods_namespace) if is_busy(pods_cluster, pods_namespace, pod)]

    victim = pods_cluster.until(used, 400, "a response is judged in a sandbox")[0]
    golden_path.kill_pod(victim)
    began = time.monotonic()
    golden_path.succeeded(pods_cluster, pods_namespace, JOB)
    print(f"from the first judged response to the end: {time.monotonic() - began:.0f} s")
    folder = pods_cluster.folder_of_claim(pods_namespace, f"{JOB}-output") / JOB
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in steps] == [1, 2]
    assert steps[0]["sandboxes/lost"] == 1.0
    assert "sandboxes/missing" not in steps[0]
    assert steps[0]["reward/left_out"] == 0, "the response was judged in another sandbox"
    kept = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert len(kept) == 64 * STEPS
    for row in kept:
        defined = [line for line in row["response"].splitlines() if line.startswith("def f")]
        is_right = bool(row["finished"] and defined and defined[-1] == RIGHT.strip())
        assert row["reward"] == float(is_right), row
    environment = json.loads((folder / "run.json").read_text())["attempts"][-1]
    assert environment["model_code"] == "sandboxes in pods"
    pods_cluster.until(lambda: not golden_path.pods(pods_cluster, pods_namespace, JOB), 120, "no pod of it is left")
    assert "succeeded" in told(pods_cluster, "why", JOB, "-n", pods_namespace)
