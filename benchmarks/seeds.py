"""An example's figures for several seeds, in one table.

    python benchmarks/seeds.py [--example 01-helpful-ppo] [--seeds 0 1 2] [--json PATH]

An example whose models another one uses runs first, with the same seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from runs import CONSOLE, ROOT, Figures, command

PPO = ("reward_before", "reward_after", "rule_before", "rule_after", "win_rate", "win_rate_null")
EXAMPLES: dict[str, dict[str, tuple[str, ...]]] = {
    "01-helpful-ppo": {"helpful-rm": ("pair_accuracy",), "helpful-ppo": PPO},
    "11-helpful-online-dpo": {"helpful-online-dpo": PPO},
    "12-arithmetic-grpo": {"arithmetic-grpo": ("reward_before", "reward_after")},
    "13-two-rewards-grpo": {"arithmetic-two-rewards": ("right_before", "right_after")},
    "19-mixture-grpo": {"mixture-grpo": ("reward_before", "reward_after")},
    "21-agent-grpo": {"agent-grpo": ("reward_before", "reward_after")},
}
"""Figures of each job of an example in the table."""
BEFORE = {"11-helpful-online-dpo": "01-helpful-ppo", "13-two-rewards-grpo": "12-arithmetic-grpo"}
"""The example whose models another one uses."""


def summary_of(example: str, seed: int) -> Figures:
    """Run the example with this seed, after the example whose models it uses; return its summary.json."""
    with tempfile.TemporaryDirectory() as folder:
        for name in (*filter(None, [BEFORE.get(example)]), example):
            line = command(ROOT / f"examples/{name}.yaml", Path(folder), "--seed", str(seed))
            subprocess.run(line, check=True, stdout=sys.stderr)
        return dict(json.loads((Path(folder) / "summary.json").read_text()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", choices=EXAMPLES, default="01-helpful-ppo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    shown = [(job, figure) for job, figures in EXAMPLES[options.example].items() for figure in figures]
    results = {seed: summary_of(options.example, seed) for seed in options.seeds}
    table = Table("seed", *(figure for _, figure in shown), "seconds in training")
    for seed, jobs in results.items():
        seconds = sum(job["seconds"] for job in jobs.values())
        table.add_row(str(seed), *(f"{jobs[job][figure]:.3f}" for job, figure in shown), f"{seconds:.0f}")
    CONSOLE.print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
