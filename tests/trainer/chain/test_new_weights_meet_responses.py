"""`rollout.partial` on Ray and vLLM: an engine of two ranks gets weights in the middle of its responses."""

import json
import shutil
from pathlib import Path

import pytest

from tests.trainer.chain.conftest import ROOT, records, rlhf
from tests.trainer.chain.faults import JOB, MANIFEST
from tests.trainer.tiny import save_tiny, tiny_config

DATA = "train.jsonl"
TRAIN = "{name: train, models: [actor, critic, reference, reward], slotsPerNode: 1}"
POOLS = f"[{TRAIN}, {{name: writers, models: [rollout], slotsPerNode: 2}}]"
TOKENS, STEPS = 150, 6
SETS = (
    f"placement.pools={POOLS}",
    "rollout.maxStaleness=2",
    "rollout.tensorParallel=2",
    "rollout.keep=1",
    f"rollout.minResponseTokens={TOKENS}",
    f"data.maxResponseTokens={TOKENS}",
    f"training.totalSteps={STEPS}",
)


@pytest.mark.slow
@pytest.mark.parametrize("partial", ["Continue", "Restart"])
def test_a_run_whose_responses_are_longer_than_its_updates(partial: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(MANIFEST)
    config = tiny_config()
    config.num_key_value_heads = 2
    for name, labels in {"language": None, "reward": 1}.items():
        save_tiny(tmp_path / "models" / name, seed=1, labels=labels, config=config)
    shutil.copy(ROOT / "examples" / "rlhf_examples" / "helpful" / DATA, tmp_path / DATA)
    sets = [f"--set={change}" for change in (*SETS, f"rollout.partial={partial}")]
    done = rlhf("run", tmp_path / "job.yaml", f"--output={tmp_path / 'run'}", *sets)
    assert done.returncode == 0, done.stderr
    found = records(tmp_path / "run" / JOB)
    assert len(found) == STEPS
    assert sum(record["rollout_interrupted"] for record in found) > 0
    assert all(record["staleness"] <= 2 for record in found)
    assert all(record["response_length/mean"] == TOKENS for record in found)
    kept = [json.loads(line) for line in (tmp_path / "run" / JOB / "rollouts.jsonl").read_text().splitlines()]
    assert {row["step"] for row in kept} == set(range(1, STEPS + 1))
    assert all(0 <= row["step"] - 1 - row["policy_version"] <= 2 for row in kept)
