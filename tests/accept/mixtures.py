"""Measures of a mixture over ranks: the losses of one rank, and replayed experts in bfloat16."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RLHF = Path(sys.executable).with_name("rlhf")
EXAMPLE = "examples/19-mixture-grpo.yaml"
MADE, JOB = "mixture-sft", "mixture-grpo"
"""The job that has made the model with which each run begins, and the job that is run."""
SHORT = ("training.totalSteps=3", "evaluation=null")
ONE = ("resources.slotsPerNode=1", "models.actor.parallelism=null")
CUT = {
    "one rank": ONE,
    "expert 2": (),
    "context 2": ("models.actor.parallelism={context: 2}",),
    "tensor 2, expert 2": ("models.actor.parallelism={tensor: 2, expert: 2}", "rollout.tensorParallel=1"),
}
ROUTED = {each: (*ONE, "training.precision=BF16", f"rollout.routing={each}") for each in ("Recompute", "Replay")}
TOLERANCE, LEAST_LOSS = 1e-3, 1e-2
"""Largest relative difference of a loss on other ranks; losses near 0 are measured against the second."""


def cut_otherwise(made: Path, folder: Path) -> dict[str, Any]:
    """Run three steps of GRPO by each layout and each routing; made: a run with the model that they begin with."""
    cut = {name: _records(made, folder / name.replace(" ", "-"), changes) for name, changes in CUT.items()}
    losses = {name: [record["loss/policy"] for record in records] for name, records in cut.items()}
    pairs = [(loss, one) for each in losses.values() for loss, one in zip(each, losses["one rank"], strict=True)]
    routed = {name: _records(made, folder / name, changes) for name, changes in ROUTED.items()}
    kl = {name: [record["kl/rollout"] for record in records] for name, records in routed.items()}
    row: dict[str, Any] = {
        "losses": losses,
        "largest difference": max(abs(loss - one) / max(abs(one), LEAST_LOSS) for loss, one in pairs),
        "bytes of weights to the generator": {name: records[-1]["bytes/reshard"] for name, records in cut.items()},
        "kl in bfloat16": kl,
        "experts that differ": [record["routing/differs"] for record in routed["Replay"]],
        "dropped": [record["experts/dropped"] for record in cut["expert 2"]],
    }
    falls = kl["Replay"][0] < kl["Recompute"][0]  # the first step of both has the same weights and responses
    row["ok"] = row["largest difference"] <= TOLERANCE and falls and not any(row["dropped"])
    return row


def _records(made: Path, output: Path, changes: tuple[str, ...]) -> list[dict[str, float]]:
    """Run the example's GRPO with changes; returns the lines of its metrics.jsonl."""
    shutil.copytree(made / MADE, output / MADE)
    command = [str(RLHF), "run", EXAMPLE, "--output", str(output)]
    for change in (*SHORT, *changes):
        command += ["--set", f"{JOB}:{change}"]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
    return [json.loads(line) for line in (output / JOB / "metrics.jsonl").read_text().splitlines()]
