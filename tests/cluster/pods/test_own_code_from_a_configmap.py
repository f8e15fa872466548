"""An own algorithm, reward, environment and tool train on real pods, from a ConfigMap as docs/extending.md says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlhf_api import kubectl_yaml
from rlhf_trainer.commands.cli import PROJECT
from tests.cluster import chart, golden_path
from tests.cluster.client import Cluster
from tests.cluster.pods.test_a_pod_reads_shapes import CLAIM, MODEL
from tests.cluster.settings import ROOT

OWN = ROOT / "examples" / "own"
FILES = (PROJECT / "better_half.py", PROJECT / "brief.py", OWN / "words.py", OWN / "inventory.py")
PAGE = (ROOT / "docs" / "extending.md").read_text()
CALL = '<tool_call>{"name":"count_of","arguments":{"thing":"apples"}}</tool_call>'
TEMPLATE = "{% for each in messages %}{{ each.content + eos_token * (each.role == 'assistant') }}{% endfor %}"
WORDS = {"environment": {"entrypoint": "words:Words", "arguments": {"wanted": 2}}}
TOOLS = {"tools": ["inventory:count_of"]}


def runtime_of_the_page() -> dict[str, Any]:
    """What the page says of pods that have the code."""
    (shown,) = re.findall(r"^```yaml\n(runtime:\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (document,) = kubectl_yaml.read(shown, "")
    return dict(document["runtime"])


def job(name: str, models: dict[str, Any], plays: dict[str, Any]) -> dict[str, Any]:
    """Two steps of the project's algorithm on episodes of this kind."""
    found = next(
        each
        for each in kubectl_yaml.read((PROJECT / "job.yaml").read_text(), "")
        if each["metadata"]["name"] == "better-half"
    )
    spec = found["spec"]
    spec["models"] = {**models, "actor": {**spec["models"]["actor"], "uri": "pvc://models/tiny"}}
    spec["rollout"] |= {**plays, "maxTurns": 3, "keep": 1.0}
    spec["training"] = {"totalSteps": 2, "promptBatchSize": 8}
    return {**found, "metadata": {"name": name}, "spec": {**spec, "runtime": runtime_of_the_page()}}


def write_model(folder: Path) -> None:
    """A model that writes nothing but calls of the tool, each with a half, or else ends its answer."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_tokens([CALL])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = AutoConfig.from_pretrained(MODEL, vocab_size=len(tokenizer), tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weights.zero_()  # a layer adds nothing to the embedding, which is the same for all tokens
        model.get_input_embeddings().weight.fill_(1.0)
        head = model.get_output_embeddings().weight.fill_(0.0)
        head[[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(CALL)]] = 20.0 / config.hidden_size
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # it is made for its owner alone, and pods are not root


@pytest.mark.slow
def test_own_code_trains_with_an_environment_and_with_a_tool(pods_cluster: Cluster, pods_namespace: str) -> None:
    chart.install(pods_cluster)
    pods_cluster.offer_volumes(3)
    pods_cluster.expect("POST", f"/api/v1/namespaces/{pods_namespace}/persistentvolumeclaims", CLAIM)
    write_model(pods_cluster.folder_of_claim(pods_namespace, "models") / "tiny")
    files = [f"--from-file={path}" for path in FILES]
    pods_cluster.kubectl("create", "configmap", "my-code", *files, "-n", pods_namespace)
    reward = {"reward": {"entrypoint": "brief:score", "arguments": {"longest": 12}}}
    jobs = {"words": job("words", {}, WORDS), "shop": job("shop", reward, TOOLS)}
    golden_path.apply(pods_cluster, pods_namespace, jobs)
    for name in jobs:
        ended = golden_path.succeeded(pods_cluster, pods_namespace, name)
        assert "advantage.compute_advantage" in json.dumps(ended["step"]), "a pod has read the step"
        folder = pods_cluster.folder_of_claim(pods_namespace, f"{name}-output") / name
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [each["step"] for each in steps] == [1, 2]
        assert all(each["episodes/failed"] == 0 and each["episodes/turns"] > 1 for each in steps)
        assert all(each["reward/mean"] != 0 for each in steps), "only own code rewards"
        assert (folder / "algorithm-from-000001.py").read_text() == FILES[0].read_text()
        rollouts = [json.loads(line)["response"] for line in (folder / "rollouts.jsonl").read_text().split("\n")[:-1]]
        is_told = any("12" in each.replace(CALL, "") for each in rollouts)  # how many apples there are
        assert is_told == (name == "shop"), rollouts
