"""Comparison of steps that were made twice: the first difference of two runs of a job."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_planning.numbers import shortened
from rlhf_trainer.run_folder.attempt import from_json
from rlhf_trainer.run_folder.evidence import RUN, parsed
from rlhf_trainer.run_folder.folder import METRICS, RANKS, reading
from rlhf_trainer.run_folder.rollouts import ROLLOUTS, read_step_rollouts
from rlhf_trainer.run_folder.step_metrics import repeats

MAX_SHOWN = 60
"""Most characters of a value in a sentence."""
WEIGHTS = "checksums of weights"


def compare(before: Path, after: Path, steps: Sequence[int]) -> tuple[str, dict[str, int]]:
    """Compare steps of two folders of a job: metrics that repeat, kept responses, weights where both have checkpoints.

    Returns (sentence on the first difference, or empty; number of values compared, by their kind).
    """
    counts = dict.fromkeys(("metrics", "fields of responses", WEIGHTS), 0)
    metrics, ranks = ([by_step(folder / name) for folder in (before, after)] for name in (METRICS, RANKS))
    rows_of = _responses if all((folder / ROLLOUTS).is_file() for folder in (before, after)) else lambda *_: {}
    saved = [weight_checksums(folder) for folder in (before, after)]
    for step in steps:
        made = [each.get(step, {}) for each in metrics]
        pairs = {
            "metrics": [{name: each[name] for name in each if repeats(name)} for each in made],
            "fields of responses": [rows_of(folder / ROLLOUTS, step) for folder in (before, after)],
            WEIGHTS: [each[step] if all(step in one for one in saved) else {} for each in saved],
        }
        differing = []
        for what, (one, other) in pairs.items():
            counts[what] += len(one)
            names = dict.fromkeys((*one, *other)) if one or other else ()
            differing += [(name, one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)]
        if differing:
            name, *both = differing[0]
            was, value = ("missing" if each is None else shortened(repr(each), MAX_SHOWN) for each in both)
            others = f" ({len(differing) - 1} more values of this step differ)" * (len(differing) > 1)
            where = first_ranks(*(each.get(step, {}).get("calls", {}) for each in ranks))
            return f"step {step}: {name} is {value}, was {was}{others}{where}", counts
    return "", counts


def weight_checksums(folder: Path) -> dict[int, dict[str, str]]:
    """Return the checksums of the checkpoints in a job's run.json: step -> {`weights of model/rank`: CRC-32}."""
    made = parsed((folder / RUN).read_bytes())["made"]
    found = {each.get("step", 0): each.get("files", {}) for each in made if each["kind"] == "checkpoint"}
    return {step: {f"weights of {name}": each for name, each in sums.items()} for step, sums in found.items()}


def by_step(file: Path) -> dict[int, dict[str, Any]]:
    """Return the complete lines of a .jsonl file by step; if a step ran twice, its later line.

    Raises EnvironmentProblem if the file is damaged.
    """
    found: dict[int, dict[str, Any]] = {}
    with reading(file):
        for line in file.read_bytes().splitlines(keepends=True) if file.is_file() else ():
            if line.endswith(b"\n"):  # a run may be writing the last line
                each = dict(from_json(line))
                found[each["step"]] = each
    return found


def _responses(file: Path, step: int) -> dict[str, Any]:
    """Return the fields of a step's kept responses as `row 3 of rollouts.jsonl: response` -> value."""
    rows = read_step_rollouts(file, step)
    return {f"row {row['row']} of {ROLLOUTS}: {name}": value for row in rows for name, value in row.items()}


def first_ranks(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the first call that differs on a rank, and the ranks, as the end of a sentence; empty if there is none."""
    for call, sums in before.items():
        if ranks := [rank for rank, value in sums.items() if after.get(call, {}).get(rank) != value]:
            return f", first in {call} on rank {', '.join(ranks)}"
    return ""
