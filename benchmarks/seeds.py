"""The demo for several seeds, in one table: python benchmarks/seeds.py [--seeds 0 1 2] [--json PATH]."""

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

MANIFEST = Path(__file__).parent.parent / "examples" / "01-helpful-ppo.yaml"
COLUMNS = ("reward_before", "reward_after", "rule_before", "rule_after", "win_rate", "win_rate_null")


def run(seed: int) -> dict[str, Any]:
    """summary.json of the chain with this seed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rlhf_trainer.cli", "run", str(MANIFEST), "--seed", str(seed)]
        subprocess.run([*command, "--output", folder], check=True, stdout=sys.stderr)
        summary: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text())
        return summary


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    results = {seed: run(seed) for seed in options.seeds}
    table = Table("seed", "pair accuracy", *COLUMNS, "seconds in training")
    for seed, jobs in results.items():
        ppo = jobs["helpful-ppo"]
        figures = [jobs["helpful-rm"]["pair_accuracy"], *(ppo[column] for column in COLUMNS)]
        seconds = sum(job["seconds"] for job in jobs.values())
        table.add_row(str(seed), *(f"{figure:.3f}" for figure in figures), f"{seconds:.0f}")
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
