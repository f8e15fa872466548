"""PPO beside a rollout pool whose responses are under way when the actor has new weights (`rollout.partial`)."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.names import Role
from rlhf_trainer.generation.vllm_engine import Response
from tests.patience import PATIENCE_SECONDS
from tests.trainer.placement.sampler import PlainSampler, Row
from tests.trainer.placement.sweep import Outcome, pools_of, run, small_job

TRAINERS, STEPS, ROWS = 2, 5, 8
WRITTEN = 2
"""Tokens of a response when new weights come."""
SECONDS = PATIENCE_SECONDS


class Patient(PlainSampler):
    """Writes on, where other weights will come for the step that learns from the responses, when they are there."""

    def __init__(self, *given: Any, meets: Sequence[int], **named: Any) -> None:
        """meets: the batches that meet weights, from 1."""
        super().__init__(*given, **named)
        self._meets, self._batch = meets, 0

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], **options: Any) -> list[Response]:
        self._batch += 1
        return super().generate(prompts, seeds, **options)

    def _write_token(self, row: Row) -> None:
        deadline = time.monotonic() + SECONDS
        while len(row.tokens) == WRITTEN and self._batch in self._meets and self.version < self._batch - 1:
            assert time.monotonic() < deadline, "no weights came"
            time.sleep(0.01)
            self.before_token()
        super()._write_token(row)


def outcome(
    folder: Path, folders: Mapping[Role, str], rollout: Mapping[str, Any], meets: Sequence[int], *, generators: int
) -> Outcome:
    training = {"totalSteps": STEPS, "promptBatchSize": ROWS, "callDeadlineSeconds": 60}
    pools = pools_of([["actor", "critic", "reference", "reward"], ["rollout"]], slots=(TRAINERS, generators))
    changes = {"rollout": rollout, "training": training}
    sampler = partial(Patient, meets=meets)
    return run(folder, small_job(folder, "PPO", folders, pools, changes=changes), folders, sampler)


@pytest.mark.parametrize(
    ("mode", "staleness"),
    [
        pytest.param("Continue", [0, 1, 1, 1, 1], id="Continue"),
        pytest.param("Restart", [0, 0, 0, 0, 1], id="Restart", marks=pytest.mark.slow),
    ],
)
def test_responses_go_on_or_begin_again(
    mode: str, staleness: list[int], folders: Mapping[Role, str], tmp_path: Path
) -> None:
    """Those of steps 2 to 4 meet the weights of the step before; nothing is sent any more for those of the last."""
    rollout = {"maxStaleness": 1, "partial": mode, "stream": mode == "Restart"}
    records = outcome(tmp_path, folders, rollout, range(2, STEPS), generators=2).records
    assert [record["staleness"] for record in records] == staleness
    for number, record in enumerate(records, 1):
        assert sum(rows for name, rows in record.items() if name.startswith("staleness_rows/")) == ROWS
        assert (record["rollout_interrupted"] > 0) == (number in range(2, STEPS))
        assert record["response_length/mean"] > 0
        assert record["kl/rollout"] < 0.1


@pytest.mark.slow
def test_responses_two_steps_ahead_wait_for_no_weights(folders: Mapping[Role, str], tmp_path: Path) -> None:
    """Step 2 trains while those of step 3 are written; without `partial` its weights would come after them."""
    rollout = {"maxStaleness": 2, "partial": "Continue", "weightSync": "Delta"}
    records = outcome(tmp_path, folders, rollout, [], generators=1).records
    assert all(record["staleness"] <= min(number, 2) for number, record in enumerate(records))
    assert all(record["response_length/mean"] > 0 for record in records)


@pytest.mark.slow
def test_without_it_responses_are_of_one_version(folders: Mapping[Role, str], tmp_path: Path) -> None:
    records = outcome(tmp_path, folders, {"maxStaleness": 1}, [], generators=2).records
    assert [record["staleness"] for record in records] == [0, 1, 1, 1, 1]
    assert not any("rollout_interrupted" in record for record in records)
