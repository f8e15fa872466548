"""`kubectl rlhf tune` on real pods: trials are queued jobs that pause at a rung, and the best one ends."""

from pathlib import Path

import pytest

from rlhf_api import kubectl_yaml
from rlhf_operator import names
from tests.cluster import chart, golden_path
from tests.cluster.client import Cluster
from tests.cluster.plugin import told
from tests.cluster.settings import ROOT
from tests.patience import PATIENCE_SECONDS

SFT, GRPO = "arithmetic-sft", "arithmetic-grpo"
STEPS, RUNG = 12, 4
RATES = (1e-6, 1e-4, 1e-3)


def manifest() -> str:
    """Example 12 with few steps."""
    jobs = golden_path.example(ROOT / "examples" / "12-arithmetic-grpo.yaml")
    jobs[SFT]["spec"]["training"]["totalSteps"] = 60
    jobs[GRPO]["spec"]["training"] |= {"totalSteps": STEPS, "promptBatchSize": 8, "miniBatchSize": 64}
    for job in jobs.values():
        job["spec"]["evaluation"]["data"]["limit"] = 16
    return "---\n".join(kubectl_yaml.write(job) for job in jobs.values())


@pytest.mark.slow
def test_the_best_trial_ends_and_the_others_stay_paused(
    pods_cluster: Cluster, pods_namespace: str, tmp_path: Path
) -> None:
    chart.install(pods_cluster)
    pods_cluster.offer_volumes(1 + len(RATES))
    (file := tmp_path / "job.yaml").write_text(manifest())
    vary = f"models.actor.optimizer.learningRate={','.join(map(str, RATES))}"
    budget = len(RATES) * RUNG + STEPS - RUNG
    words = ("--vary", vary, "--measure", "evaluation/reward", "--budget", budget, "-n", pods_namespace)
    printed = told(pods_cluster, "tune", file, *words, seconds=5 * PATIENCE_SECONDS)
    jobs = pods_cluster.items(f"{golden_path.JOBS.format(pods_namespace)}?labelSelector={names.TUNE}={GRPO}")
    ended = {job["metadata"]["name"]: (job["status"]["phase"], golden_path.step(job["status"])) for job in jobs}
    assert set(ended) == {f"{GRPO}-t{number}" for number in range(1, 1 + len(RATES))}
    assert sorted(ended.values()) == [("Succeeded", STEPS), *[("Suspended", RUNG)] * (len(RATES) - 1)]
    (best,) = (name for name, (phase, _) in ended.items() if phase == "Succeeded")
    assert printed.splitlines()[-1].startswith(f"best: {best} --set ")
    assert golden_path.status(pods_cluster, pods_namespace, SFT)["phase"] == "Succeeded"
