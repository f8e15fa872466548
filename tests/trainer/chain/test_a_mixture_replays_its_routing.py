"""GRPO of a tiny mixture on one CPU slot in bfloat16, with the generator's experts and with the trainer's own."""

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
