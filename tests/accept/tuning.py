"""Figures of `rlhf tune` and of a steered learning rate, on the sums of example 12, for the row `rounds`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlhf_planning.halving import rungs_of, steps_of

ROOT = Path(__file__).resolve().parents[2]
RLHF = Path(sys.executable).with_name("rlhf")
EXAMPLE, SFT, JOB = "examples/12-arithmetic-grpo.yaml", "arithmetic-sft", "arithmetic-grpo"
SEEDS = (0, 1, 2)
SMALL = ("training.promptBatchSize=16", "training.miniBatchSize=64", "training.totalSteps=36", "evaluation.everySteps=")
GRID = {"models.actor.optimizer.learningRate": "1e-4,5e-4,2e-3", "rollout.samplesPerPrompt": "4,8,16"}
TRIALS, STEPS, SHARE, MEASURE = 9, 36, 0.4, "evaluation/reward"
BUDGET, LEAST_OF_BEST = int(SHARE * TRIALS * STEPS), 0.95
STEERED = (
    "training.totalSteps=120",
    "evaluation=null",
    "algorithm.kl={coefficient: 0.0, controller: LearningRate, target: 0.02, horizon: 5120}",
    "models.actor.optimizer.schedule=Constant",
)
TARGET, HELD = 0.02, 0.2


def tune(made: Path, folder: Path) -> dict[str, Any]:
    """Search a grid of nine by halving, and then whole; made: a run with the model that every trial begins with."""
    row: dict[str, Any] = {"seeds": []}
    for seed in SEEDS:
        halved, grid = (folder / f"{name}-{seed}" for name in ("halved", "grid"))
        shutil.copytree(made / SFT, halved / SFT)
        found = _tuned(halved, seed, BUDGET)
        shutil.copytree(halved, grid, symlinks=True)  # the other trials go on to the end: a resumed run is the same
        whole = _tuned(grid, seed, TRIALS * STEPS)
        best, least = (
            max(each["value"] for each in known["trials"] if each["step"] == STEPS) for known in (whole, found)
        )
        steps = steps_of(rungs_of(TRIALS, STEPS, BUDGET)) / (TRIALS * STEPS)
        row["seeds"].append({"grid": best, "halved": least, "of_best": least / best, "of_steps": steps})
    row["ok"] = all(each["of_best"] >= LEAST_OF_BEST and each["of_steps"] <= SHARE for each in row["seeds"])
    return row


def _tuned(output: Path, seed: int, budget: int) -> dict[str, Any]:
    """Run `rlhf tune` on the grid, and return its tune.json."""
    words = ["tune", EXAMPLE, "--output", output, "--measure", MEASURE, "--budget", budget]
    for path, values in GRID.items():
        words += ["--vary", f"{path}={values}"]
    _rlhf(*words, *_sets(*SMALL, f"training.seed={seed}"))
    tuned: dict[str, Any] = json.loads((output / "tune.json").read_text())
    return tuned


def steered_rate(made: Path, folder: Path) -> dict[str, Any]:
    """Steer the KL of updates by the learning rate; figures of the last half of the steps, over its target."""
    row: dict[str, Any] = {"of_target": []}
    for seed in SEEDS:
        output = folder / f"steered-{seed}"
        shutil.copytree(made / SFT, output / SFT)
        _rlhf("run", EXAMPLE, "--output", output, *_sets(*STEERED, f"training.seed={seed}"))
        lines = (output / JOB / "metrics.jsonl").read_text().splitlines()
        measured = [json.loads(line)["kl/update"] for line in lines[-len(lines) // 2 :]]
        row["of_target"].append(sum(measured) / len(measured) / TARGET)
    row["ok"] = all(abs(each - 1.0) <= HELD for each in row["of_target"])
    return row


def _sets(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", f"{JOB}:{change}")]


def _rlhf(*words: object) -> None:
    subprocess.run([str(RLHF), *map(str, words)], cwd=ROOT, stdout=sys.stderr, check=True)
