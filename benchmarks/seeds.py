"""An example for several seeds, in one table: python benchmarks/seeds.py [--example 01-helpful-ppo] [--seeds 0 1 2]."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).parent.parent / "examples"
PPO = ("reward_before", "reward_after", "rule_before", "rule_after", "win_rate", "win_rate_null")
FIGURES: dict[str, dict[str, tuple[str, ...]]] = {
    "01-helpful-ppo": {"helpful-rm": ("pair_accuracy",), "helpful-ppo": PPO},
    "11-helpful-online-dpo": {"helpful-online-dpo": PPO},
    "12-arithmetic-grpo": {"arithmetic-grpo": ("reward_before", "reward_after")},
}
"""Figures of each job of an example in the table."""
BEFORE = {"11-helpful-online-dpo": "01-helpful-ppo"}
"""The example whose models another one uses."""


def run(example: str, seed: int) -> dict[str, Any]:
    """summary.json of the chain with this seed."""
    with tempfile.TemporaryDirectory() as folder:
        for name in (*filter(None, [BEFORE.get(example)]), example):
            manifest = EXAMPLES / f"{name}.yaml"
            command = [sys.executable, "-m", "rlhf_trainer", "run", str(manifest), "--seed", str(seed)]
            subprocess.run([*command, "--output", folder], check=True, stdout=sys.stderr)
        summary: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text())
        return summary


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--example", choices=FIGURES, default="01-helpful-ppo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    shown = [(job, figure) for job, figures in FIGURES[options.example].items() for figure in figures]
    results = {seed: run(options.example, seed) for seed in options.seeds}
    table = Table("seed", *(figure for _, figure in shown), "seconds in training")
    for seed, jobs in results.items():
        seconds = sum(job["seconds"] for job in jobs.values())
        table.add_row(str(seed), *(f"{jobs[job][figure]:.3f}" for job, figure in shown), f"{seconds:.0f}")
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
