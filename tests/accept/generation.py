"""Measures corrections, rounded weights, drafts, distillation and shared turns for the row `rollouts`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import rollouts
from corrections import compare_corrections
from transformers import LlamaConfig

from rlhf_api.spec.rollout import Rollout
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.generation.families import must_quantize

SUMS, DISTILLATION = "arithmetic-grpo", "examples/20-distillation.yaml"
LOST, MOST_KL = rollouts.WITHIN, 1e-2
"""Most of example 12's right sums that rounded weights may cost, and most of their KL from the trainer."""
UNLIKELY = 0.001
"""Chi-square probability below which two samples are taken to be of two distributions."""
TOKENS = 3
SHORT = ("training.totalSteps=8", "evaluation=null")
OF_TEACHER, SECONDS = 0.95, 180.0
"""Least share of the teacher's accuracy that its student reaches, and most seconds of the student's job."""


def all_of_them(folder: Path) -> dict[str, Any]:
    """The figures of each part; `ok` if all are in their ranges."""
    row: dict[str, Any] = {}
    for part in (corrections, quantised, drafts, distilled, prefix_trees):
        row[part.__name__] = found = part(folder)
        print(f"{part.__name__}: {json.dumps(found)}", file=sys.stderr)
    row["ok"] = all(found.pop("ok") for found in row.values())
    return row


def corrections(_: Path) -> dict[str, Any]:
    """Largest difference of weights, masks and losses from the peers' own functions, or a sentence without them."""
    row = compare_corrections()
    if row["against"] == ["own formulas"]:
        row["peers"] = "verl and TRL are not installed (make bench-peers); compared with plain formulas only"
    return row


def quantised(folder: Path) -> dict[str, Any]:
    """Right sums of example 12 with weights of 8 bits and without, and the KL of generator and trainer.

    On a CPU that is refused 8 bits: the refusal alone.
    """
    row: dict[str, Any] = {}
    try:
        must_quantize(Rollout(quantization="Int8"), LlamaConfig(), on_cpu=True)
    except ConfigError as error:
        return {"refused": str(error), "ok": True}
    runs = {"unquantised": _sums(folder)}
    runs["Int8"] = rollouts.run_last(folder, SUMS, "int8", ("rollout.quantization=Int8",))
    for name, output in runs.items():
        kl = [record["kl/rollout"] for record in rollouts.steps_of(output, SUMS)]
        accuracy = rollouts.measured(output, SUMS, "reward_after")
        row[name] = {"right sums": accuracy, "kl/rollout, mean": statistics.mean(kl), "kl/rollout, most": max(kl)}
    whole, rounded = row["unquantised"], row["Int8"]
    row["ok"] = whole["right sums"] - rounded["right sums"] <= LOST and rounded["kl/rollout, mean"] <= MOST_KL
    return row


def drafts(folder: Path) -> dict[str, Any]:
    """Accepted share of drafts, and the chi-square test of responses with drafts against those without."""
    command = [sys.executable, "-m", "tests.accept.drafts"]
    found = subprocess.run(command, cwd=rollouts.ROOT, stdout=subprocess.PIPE, check=True).stdout
    row: dict[str, Any] = json.loads(found)
    draft = (_sums(folder) / "arithmetic-sft" / "model").resolve().as_uri()
    for method, own in {"NGram": "", "Draft": f", draft: '{draft}'"}.items():
        change = f"rollout.speculation={{method: {method}, tokens: {TOKENS}{own}}}"
        output = rollouts.run_last(folder, SUMS, f"drafts-{method}", (change, *SHORT))
        shares = [record["draft_acceptance"] for record in rollouts.steps_of(output, SUMS)]
        row[method]["accepted in example 12"] = shares
    row["ok"] = all(each["chi-square p"] > UNLIKELY for each in row.values())
    return row


def distilled(folder: Path) -> dict[str, Any]:
    """Example 20: right sums of teacher and student, and the seconds of the student's job."""
    output = folder / "distilled"
    command = [str(rollouts.RLHF), "run", DISTILLATION, "--output", str(output)]
    subprocess.run(command, cwd=rollouts.ROOT, stdout=sys.stderr, check=True)
    summary = json.loads((output / "summary.json").read_text())
    steps = rollouts.steps_of(output, "sums-distilled")
    taught = [record["reward/mean"] for record in rollouts.steps_of(output, "teacher-measured")]
    row: dict[str, Any] = {
        "teacher": statistics.mean(taught),
        "student before": summary["sums-distilled"]["right_before"],
        "student": summary["sums-distilled"]["right_after"],
        "seconds": sum(record["time/step"] for record in steps),
    }
    row["ok"] = row["student"] >= OF_TEACHER * row["teacher"] and row["seconds"] <= SECONDS
    return row


def prefix_trees(folder: Path) -> dict[str, Any]:
    """Tokens and seconds of a training step on episodes of six turns, shared and not: `benchmarks/step.py`."""
    found = folder / "episodes.json"
    command = [sys.executable, "benchmarks/step.py", "--episodes", "--rounds=1", "--steps=2", f"--json={found}"]
    code = subprocess.run(command, cwd=rollouts.ROOT, stdout=sys.stderr, check=False).returncode
    if not found.is_file():
        return {"ok": False, "missing": f"benchmarks/step.py --episodes exits with {code} and wrote no figures"}
    row: dict[str, Any] = json.loads(found.read_text())
    shared = [each["tokens"]["shared"] < each["tokens"]["whole"] for each in row["episodes"].values()]
    return {**row, "ok": all(shared)}


def _sums(folder: Path) -> Path:
    """The run of example 12 of another row, or one made here."""
    output = folder / "verifiable_rewards"
    if not (output / "summary.json").is_file():
        command = [str(rollouts.RLHF), "run", rollouts.EXAMPLES[SUMS], "--output", str(output)]
        subprocess.run(command, cwd=rollouts.ROOT, stdout=sys.stderr, check=True)
    return output
