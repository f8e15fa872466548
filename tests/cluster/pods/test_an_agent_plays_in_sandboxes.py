"""The agent of example 21 on real pods: each episode's program runs in a sandbox, and asks the model through it."""

import json
from typing import Any

import pytest

from rlhf_operator import names
from tests.cluster import chart, golden_path
from tests.cluster.client import Cluster
from tests.cluster.settings import ROOT

JOB, EPISODES = "agent-grpo", 16


def jobs() -> dict[str, dict[str, Any]]:
    """Both jobs of the example, with fewer steps: two of 16 episodes over 4 sandboxes after 60 of SFT."""
    found = golden_path.example(ROOT / "examples" / "21-agent-grpo.yaml")
    for each in found.values():
        each["spec"]["resources"] = {"device": "CPU", "slotsPerNode": 1}
        del each["spec"]["evaluation"]
    found["agent-sft"]["spec"]["training"]["totalSteps"] = 60
    spec = found[JOB]["spec"]
    spec["rollout"] |= {"samplesPerPrompt": EPISODES // 2, "keep": 1.0}
    spec["training"] = {"totalSteps": 2, "promptBatchSize": 2}
    spec["sandbox"] = {"cpu": "50m", "memory": "512Mi", "warm": 4}
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_agent_plays_in_sandboxes(pods_cluster: Cluster, pods_namespace: str) -> None:
    chart.install(pods_cluster)
    pods_cluster.offer_volumes(2)
    golden_path.apply(pods_cluster, pods_namespace, jobs())
    golden_path.succeeded(pods_cluster, pods_namespace, JOB)
    folder = pods_cluster.folder_of_claim(pods_namespace, f"{JOB}-output") / JOB
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [each["episodes/failed"] for each in steps] == [0, 0]
    assert all(each["episodes/turns"] >= 1 for each in steps)
    kept = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert len(kept) == 2 * EPISODES
    environment = json.loads((folder / "run.json").read_text())["attempts"][-1]
    assert environment["model_code"] == "sandboxes in pods"
    pods_cluster.until(
        lambda: not golden_path.pods(pods_cluster, pods_namespace, JOB, names.SANDBOX), 120, "no sandbox is left"
    )
