"""Files of responses, JSON lines: the data set of a job that generates, and the kept responses of a job that trains.

The first rank writes a file. No text passes through the controller.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlhf_api.measures import pass_sizes
from rlhf_api.spec.algorithms import RESPONSE_COLUMNS, Writing
from rlhf_api.spec.verifiers import RewardVerifier
from rlhf_trainer.errors import EnvironmentProblem, NumericsError
from rlhf_trainer.generation.vllm_engine import response_seed
from rlhf_trainer.ops.advantages import SIGNAL
from rlhf_trainer.ops.masks import keep, row_sums
from rlhf_trainer.ops.pass_at_k import pass_at
from rlhf_trainer.protocols import DP_PROTO, ONE_TO_ALL
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.saving import disk_errors
from rlhf_trainer.types import PARENTS, Batch, register
from rlhf_trainer.workers.base import TEXT_FIELDS, WorkerSetting
from rlhf_trainer.workers.rollout import oldest_version
from rlhf_trainer.workers.samples import EPISODES, RAW_PROMPTS, from_bytes, sample_of, turns_of

FILE = "responses.jsonl"
WRITTEN_FIELDS = (*TEXT_FIELDS, "finished", RAW_PROMPTS)
KEPT_FIELDS = (*TEXT_FIELDS, "finished", "policy_version", "scores")
MISMATCH_FIELDS = ("old_log_probs", "rollout_log_probs")
KEPT_IF_THERE = ("advantages", "costs", "columns", "reward_parts", "turn_rewards", PARENTS, EPISODES, *MISMATCH_FIELDS)
WORST_TOKENS = 10
"""Number of tokens of a step that are recorded for the largest mismatch between trainer and generator."""
SEEDS = 2.0**56
"""Number of different results of `response_seed`."""
Row = dict[str, Any]


class ResponseWriter:
    """One rank of the worker that writes the data set of a job, which a later job reads by `job://`."""

    def __init__(self, setting: WorkerSetting, *, folder: str, columns: Collection[str]) -> None:
        """folder: receives the data set; columns: names of the read data's columns that the written rows also have."""
        algorithm = setting.job.spec.algorithm
        assert isinstance(algorithm, Writing), "other jobs write no data set"
        self._algorithm, self._tokenizer = algorithm, setting.tokenizer()
        self._group, self._file = setting.job.spec.rollout.samples_per_prompt, Path(folder) / FILE
        self._passes = isinstance(setting.job.spec.models.reward, RewardVerifier)
        self._columns = columns
        self._sums: dict[str, float] = defaultdict(float)
        self._bytes = 0

    @register(DP_PROTO, reads=WRITTEN_FIELDS, reads_if_there=("scores", "reward_parts", "columns"))
    def write(self, batch: Batch) -> None:
        """Append the data set's rows for the batch's prompts to the file; responses without a score are left out."""
        there = (batch["response_mask"] > 0).any(1).nonzero()[:, 0].tolist()
        numbered = rows_on_first_rank([(batch.start + row, self._row(batch, row)) for row in there])
        if numbered is None:
            return
        found = sorted(numbered, key=lambda each: int(each[0]))
        for _, row in found:
            require_finite(row)
        groups = [[row for _, row in group] for _, group in groupby(found, lambda each: each[0] // self._group)]
        rows = [row for group in groups for row in rows_of(self._algorithm, group)]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(errors="replace")
        with disk_errors("data set", self._file), self._file.open("ab") as file:
            file.write(text)
        self._bytes += len(text)
        for group in groups:
            self._count(group)
        self._sums["rows"] += len(rows)

    @register(ONE_TO_ALL)
    def counters(self) -> dict[str, Any]:
        """Return the state for a checkpoint, JSON values of the first rank, after the written rows are on the disk."""
        if dist.get_rank() == 0 and self._file.exists():
            with disk_errors("data set", self._file), self._file.open("ab") as file:
                os.fsync(file.fileno())
        return {"bytes": self._bytes, "sums": dict(self._sums)}

    @register(ONE_TO_ALL)
    def set_counters(self, *, counters: Mapping[str, Any]) -> None:
        """Restore the state of `counters`; cut off later steps' rows. EnvironmentProblem if earlier rows are lost."""
        self._bytes, self._sums = counters["bytes"], defaultdict(float, counters["sums"])
        if dist.get_rank() > 0:
            return
        there = self._file.stat().st_size if self._file.exists() else 0
        if there < self._bytes:
            lost = f"has {there} bytes, but {self._bytes} were written up to the checkpoint; --restart begins again"
            raise EnvironmentProblem(f"{self._file}: {lost}")
        if there:
            with disk_errors("data set", self._file):
                os.truncate(self._file, self._bytes)

    @register(ONE_TO_ALL)
    def summary(self) -> dict[str, float]:
        """Return counts of the written rows, and means over responses and prompts, on the first rank."""
        found: dict[str, float] = {name: int(self._sums[name]) for name in ("prompts", "responses", "rows")}
        for name in sorted(self._sums.keys() - found.keys()):
            kind, _, measure = name.partition("/")
            found[measure] = self._sums[name] / self._sums[kind]
        return found

    def _row(self, batch: Batch, row: int) -> Row:
        """Return the data set's row for one of this rank's responses."""
        sample, fields = sample_of(batch, row, self._tokenizer), batch.fields
        found: Row = {name: value for name, value in sample.columns.items() if name in self._columns}
        found |= from_bytes(fields[RAW_PROMPTS][row]) | {"response": sample.response}
        if "scores" in fields:
            found["reward"] = float(batch["scores"][row])
        if "reward_parts" in fields and (parts := from_bytes(fields["reward_parts"][row])):
            found["reward_parts"] = parts
        length = int((batch["response_mask"][row] > 0).sum())
        return found | {"finished": sample.finished, "response_tokens": length, "sample": sample.row % self._group}

    def _count(self, group: Sequence[Row]) -> None:
        """Add the responses to one prompt to the sums of the summary and to the measurements of the step."""
        rewards = [row["reward"] for row in group if "reward" in row]
        self._sums["prompts"] += 1
        self._sums["responses"] += len(group)
        for row in group:
            self._sums["responses/response_finished"] += row["finished"]
            self._sums["responses/response_tokens"] += row["response_tokens"]
        if not rewards:
            return
        recorder.mean("reward/mean", sum(rewards), len(rewards))
        self._sums["responses/reward"] += sum(rewards)
        if self._group > 1:
            self._sums["prompts/reward_best"] += max(rewards)
        for size in pass_sizes(self._group) if self._passes else ():
            passed = sum(reward == 1.0 for reward in rewards)
            self._sums[f"prompts/reward_pass_at_{size}"] += pass_at(size, samples=self._group, passed=passed)


class RolloutKeeper:
    """One rank of the worker that writes a share of the actor's training responses to a file (`rollout.keep`)."""

    def __init__(self, setting: WorkerSetting, *, file: str) -> None:
        self._tokenizer, self._file = setting.tokenizer(), Path(file)
        spec = setting.job.spec
        self._share, self._seed, self._group = spec.rollout.keep, spec.training.seed, spec.rollout.samples_per_prompt

    @register(DP_PROTO, reads=KEPT_FIELDS, reads_if_there=KEPT_IF_THERE)
    def keep(self, batch: Batch) -> None:
        """Append a line to the file for each response to a kept prompt, except rows from which nothing is learned.

        Rows with one of the step's worst tokens, by the ratio of trainer's to generator's probability, are kept, too.
        """
        learned = (batch["response_mask"] > 0).any(1).nonzero()[:, 0].tolist()
        worst = self._worst_tokens(batch)
        # The prompt seeds the draw, so the choice is the same on any number of ranks and after a resume.
        seeds = {row: response_seed(self._seed, batch.step, (batch.start + row) // self._group) for row in learned}
        kept = [
            self._row(batch, row) | ({"worst_tokens": worst[row]} if row in worst else {})
            for row in learned
            if row in worst or seeds[row] / SEEDS < self._share
        ]
        if (rows := rows_on_first_rank(kept)) is not None:
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            with disk_errors("rollouts", self._file), self._file.open("a", encoding="utf-8", errors="replace") as file:
                file.writelines(["\n" * _is_torn(self._file), *lines])

    def _worst_tokens(self, batch: Batch) -> dict[int, list[dict[str, Any]]]:
        """Return the step's tokens of largest mismatch in this rank's rows: row -> tokens, worst first. A collective.

        Empty if the batch has no old log-probabilities yet, or only the generator's own.
        """
        if not set(MISMATCH_FIELDS) <= batch.fields.keys():
            return {}
        old, generators = (batch[name] for name in MISMATCH_FIELDS)
        ratios = keep(old - generators, batch["response_mask"])
        own = ratios.abs().flatten().topk(min(WORST_TOKENS, ratios.numel()))
        places = [(value, dist.get_rank(), place) for value, place in zip(*map(Tensor.tolist, own), strict=True)]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, places)
        found: dict[int, list[dict[str, Any]]] = {}
        for value, rank, place in sorted((each for part in every for each in part), reverse=True)[:WORST_TOKENS]:
            row, position = divmod(place, ratios.shape[1])
            if value > 0.0 and rank == dist.get_rank():
                found.setdefault(row, []).append(
                    {
                        "token": self._tokenizer.decode([int(batch["tokens"][row, position])]),
                        "position": int((batch["response_mask"][row, :position] > 0).sum()),
                        "log_prob": float(old[row, position]),
                        "generator_log_prob": float(generators[row, position]),
                    }
                )
        return found

    def _row(self, batch: Batch, row: int) -> dict[str, Any]:
        """Return the JSON object that the file gets for one of this rank's rows."""
        sample, fields, response = sample_of(batch, row, self._tokenizer), batch.fields, batch["response_mask"][row]
        facts = from_bytes(fields[EPISODES][row]) if EPISODES in fields else {}
        start, count = facts.get("prompt_tokens", int((response > 0).int().argmax())), float(response.sum())
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
        if facts:
            found["episode"] = facts
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


def rows_on_first_rank(rows: list[Any]) -> list[Any] | None:
    """Gather the rows of all ranks, in the order of the ranks; None on all ranks but the first. A collective."""
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(rows, parts)
    return None if parts is None else [row for part in parts for row in part]


def _is_torn(file: Path) -> bool:
    """Return whether the file's last line is incomplete, as a run was killed while it wrote the line."""
    with file.open("rb") as opened:
        opened.seek(-min(1, file.stat().st_size), os.SEEK_END)
        return opened.read(1) not in (b"", b"\n")


def require_finite(row: Row) -> None:
    """Raise NumericsError for a reward that is not finite: JSON cannot hold it, and no response would be the best."""
    reward = row.get("reward", 0.0)
    if not math.isfinite(reward):
        raise NumericsError(f"spec.models.reward: gives {reward} to a response: the model is broken")


def rows_of(options: Writing, group: Sequence[Row]) -> list[Row]:
    """Return the data set's rows for the responses to one prompt, by the option `rows`.

    A response that has not ended by itself is never the best, as its text is cut off. As the worst of a pair, an
    unfinished response is taken before any finished one, as in OnlineDPO.
    """
    good = [row for row in group if options.min_reward is None or row["reward"] >= options.min_reward]
    if options.rows == "Responses":
        return good
    best = max((row for row in good if row["finished"]), key=itemgetter("reward"), default=None)
    if best is None or options.rows == "Best":
        return [best] if best else []
    return pair_of(best, group)


def pair_of(best: Row, group: Sequence[Row]) -> list[Row]:
    """Return a list of one row, with a prompt's best and worst response; empty if they are equally good."""
    worst = min(group, key=lambda row: (row["finished"], row["reward"]))
    if worst["finished"] and best["reward"] - worst["reward"] <= SIGNAL:
        return []
    sides = {"chosen": best["response"], "rejected": worst["response"]}
    shared = {name: value for name, value in best.items() if name not in RESPONSE_COLUMNS or name == "prompt"}
    return [{**shared, **sides, "chosen_reward": best["reward"], "rejected_reward": worst["reward"]}]
