"""GRPO of a tiny mixture on one CPU slot in bfloat16, with the generator's experts and with the trainer's own.

Fast tests of its parts: tests/trainer/training/test_routing_is_replayed.py, and
tests/trainer/generation/test_experts_come_with_responses.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.chain.conftest import records, rlhf
from tests.trainer.families import FAMILIES
from tests.trainer.tiny import save_tiny

STEPS = 2


def grpo(name: str, model: str, **rollout: Any) -> dict[str, Any]:
    """A job whose two updates a step need a pass for the old log-probabilities."""
    return {
        "apiVersion": "rlhf.hybridflow.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {"name": name},
        "spec": {
            "algorithm": {"name": "GRPO", "kl": {"coefficient": 0.0}},
            "models": {
                "actor": {"uri": f"file://{model}", "optimizer": {"learningRate": 1e-3}},
                "reward": {"verifier": {"name": "Math", "answerKey": "answer"}},
            },
            "data": {
                "train": {"uri": "package://rlhf_examples/arithmetic/train.jsonl"},
                "maxPromptTokens": 24,
                "maxResponseTokens": 32,
            },
            "rollout": {"samplesPerPrompt": 4, "keep": 1.0, **rollout},
            "training": {"totalSteps": STEPS, "promptBatchSize": 16, "miniBatchSize": 32, "precision": "BF16"},
            "resources": {"slotsPerNode": 1},
        },
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("mixture")
    model = save_tiny(base / "model", seed=1, config=FAMILIES["Qwen3-MoE"])
    jobs = [grpo("replayed", model), grpo("recomputed", model, routing="Recompute")]
    (base / "jobs.yaml").write_text("---\n".join(map(yaml.safe_dump, jobs)))
    done = rlhf("run", base / "jobs.yaml", "--output", base / "run")
    assert done.returncode == 0, done.stderr
    return base / "run"


@pytest.mark.slow
def test_a_mixture_learns_with_its_generators_experts(run: Path) -> None:
    replayed, recomputed = (records(run / name) for name in ("replayed", "recomputed"))
    assert len(replayed) == len(recomputed) == STEPS
    for record, other in zip(replayed, recomputed, strict=True):
        assert 0.0 < record["routing/differs"] < 0.5
        assert record["routing/prompts_differ"] < 0.5
        assert record["bytes/controller"] == 0
        assert "routing/differs" not in other
    assert sum(record["kl/rollout"] for record in replayed) < sum(record["kl/rollout"] for record in recomputed)
    rollouts = (run / "replayed" / "rollouts.jsonl").read_text()
    assert rollouts
    assert "experts" not in rollouts


@pytest.mark.slow
def test_stale_rows_of_an_adapter_are_replayed_after_a_resume(tmp_path: Path) -> None:
    """The generator works ahead in a pool of its own, its rows are scored as they end, and a second run goes on."""
    model = save_tiny(tmp_path / "model", seed=1, config=FAMILIES["Qwen3-MoE"])
    made = grpo("ahead", model, maxStaleness=1, stream=True)
    spec = made["spec"]
    spec["models"]["actor"]["lora"] = {"rank": 4, "targets": ["q_proj", "v_proj"]}
    pools = [
        {"name": name, "models": [role], "slotsPerNode": 1} for name, role in (("train", "actor"), ("write", "rollout"))
    ]
    spec["placement"] = {"mode": "Manual", "pools": pools}
    spec["checkpoint"] = {"everySteps": 1}
    del spec["resources"]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(made))
    for steps in (STEPS, STEPS + 2):
        done = rlhf(
            "run", tmp_path / "job.yaml", "--output", tmp_path / "run", f"--set=ahead:training.totalSteps={steps}"
        )
        assert done.returncode == 0, done.stderr
    found = records(tmp_path / "run" / "ahead")
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    assert [record["staleness"] for record in found] == [0, 1, 0, 1]
    for record in found:
        assert 0.0 < record["routing/differs"] < 0.5
        assert record["kl/rollout"] < 1e-3
