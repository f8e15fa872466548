"""Keeps a share of the responses that an actor learns from, as texts with scores, advantages and columns."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rlhf_trainer.generation.vllm_engine import response_seed
from rlhf_trainer.ops.masks import row_sums
from rlhf_trainer.protocols import DP_PROTO
from rlhf_trainer.training.saving import disk_errors
from rlhf_trainer.types import Batch, register
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.rollout import oldest_version
from rlhf_trainer.workers.samples import from_bytes, rows_on_first_rank, sample_of, turns_of

READS = ("tokens", "attention_mask", "response_mask", "finished", "policy_version", "scores")
READS_IF_THERE = ("advantages", "costs", "columns", "reward_parts", "turn_rewards")
SEEDS = 2.0**56
"""Number of different results of `response_seed`."""


class RolloutKeeper:
    """One rank of the worker that keeps responses in a file (`rollout.keep`), which the first rank writes.

    No text passes through the controller.
    """

    def __init__(self, setting: WorkerSetting, *, file: str) -> None:
        self._tokenizer, self._file = setting.tokenizer(), Path(file)
        spec = setting.job.spec
        self._share, self._seed, self._group = spec.rollout.keep, spec.training.seed, spec.rollout.samples_per_prompt

    @register(DP_PROTO, reads=READS, reads_if_there=READS_IF_THERE)
    def keep(self, batch: Batch) -> None:
        """Add a line to the file for each response to the kept prompts, without rows that nothing is learned from."""
        learned = (batch["response_mask"] > 0).any(1).nonzero()[:, 0].tolist()
        kept = [self._row(batch, row) for row in learned if self._keeps(batch.step, batch.start + row)]
        if (rows := rows_on_first_rank(kept)) is not None:
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            with disk_errors("rollouts", self._file), self._file.open("a", encoding="utf-8", errors="replace") as file:
                file.writelines(["\n" * _is_torn(self._file), *lines])

    def _keeps(self, step: int, row: int) -> bool:
        """Whether the responses to the prompt of a row are kept: the same on any number of ranks, and when resumed."""
        return response_seed(self._seed, step, row // self._group) / SEEDS < self._share

    def _row(self, batch: Batch, row: int) -> dict[str, Any]:
        """Return the JSON object that the file gets for one of this rank's rows."""
        sample, fields, response = sample_of(batch, row, self._tokenizer), batch.fields, batch["response_mask"][row]
        start, count = int((response > 0).int().argmax()), float(response.sum())
        found: dict[str, Any] = {
            "step": batch.step,
            "row": sample.row,
            "prompt": sample.prompt,
            "response": sample.response,
            "reward": float(batch["scores"][row]),
        }
        if "turn_rewards" in fields:
            turns = turns_of(batch, row, self._tokenizer)
            prompt = self._tokenizer.decode(batch["tokens"][row, :start], skip_special_tokens=True)
            found |= {"prompt": prompt, "response": "".join(turn["text"] for turn in turns), "turns": turns}
        if "reward_parts" in fields and (parts := from_bytes(fields["reward_parts"][row])):
            found["reward_parts"] = parts
        if "costs" in fields:
            found["cost"] = float(fields["costs"][row])
        if "advantages" in fields:
            total = row_sums(fields["advantages"][row : row + 1], batch["response_mask"][row : row + 1])
            found["advantage"] = float(total) / count
        if "columns" in fields:
            found["columns"] = from_bytes(fields["columns"][row])
        return found | {
            "finished": sample.finished,
            "prompt_tokens": start,
            "response_tokens": int(count),
            "policy_version": int(oldest_version(fields)[row]),
        }


def _is_torn(file: Path) -> bool:
    """Return whether the file's last line is incomplete, as of a run that was killed while it wrote the line."""
    with file.open("rb") as opened:
        opened.seek(-min(1, file.stat().st_size), os.SEEK_END)
        return opened.read(1) not in (b"", b"\n")
