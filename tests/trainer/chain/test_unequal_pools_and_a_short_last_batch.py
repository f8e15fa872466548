"""PPO on pools of 2 and 1 slots, one epoch whose last step has fewer rows than there are mini-batches."""

from pathlib import Path

import pytest

from tests.trainer.chain.conftest import LEFT, MANIFEST, RIGHT, SHORT, only_ppo_left, records, rlhf

POOLS = f"[{LEFT}, slotsPerNode: 2}}, {RIGHT}, slotsPerNode: 1}}]"
ALGORITHM = "{name: PPO, kl: {coefficient: 0.1, controller: Adaptive, target: 1.0}, entropyCoefficient: 0.01}"


def test_padding_rows_count_for_nothing(chain: tuple[Path, str], tmp_path: Path) -> None:
    output = only_ppo_left(chain, tmp_path / "run")
    done = rlhf(
        "run",
        MANIFEST,
        f"--output={output}",
        *SHORT[:2],
        SHORT[3],
        "--set=helpful-ppo:training={totalEpochs: 1, promptBatchSize: 16, miniBatchSize: 2, updateEpochs: 2}",
        f"--set=helpful-ppo:algorithm={ALGORITHM}",
        "--set=helpful-ppo:data.train.limit=19",
        "--set=helpful-ppo:rollout.samplesPerPrompt=2",
        "--set=helpful-ppo:placement.mode=Manual",
        f"--set=helpful-ppo:placement.pools={POOLS}",
    )
    assert done.returncode == 0, done.stderr
    full, short = records(output / "helpful-ppo")
    assert full["kl/coefficient"] != short["kl/coefficient"], "Adaptive moved it"
    assert 0 < short["loss/value"] < 100
    assert short["reward/mean"] == pytest.approx(full["reward/mean"], abs=5)
    assert short["policy_version"] == 1
