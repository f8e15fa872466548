"""TRL beside ours, on the same models, prompts and forced lengths: `make bench-peers`.

    python benchmarks/peers.py [--json PATH] [--columns COLUMN ...] [--rounds N] [--steps N]

The work is that of `work`: a rule as reward, the same KL weight, one optimizer step a step. TRL generates by
transformers with all cores. Rounds of ours and of TRL alternate; a ratio is that of the medians of a round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from work import (
    COLUMNS,
    RESPONSE_TOKENS,
    RESPONSES,
    SIZES,
    Column,
    host,
    make_inputs,
    manifest,
    ratio,
    records_of,
    run,
    spread,
)

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".venv-peers"
WITH_PPO = PEERS / "ppo"
"""The last TRL that had PPO."""


def measure(column: Column, *, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds a step of both, in each round, and what TRL did in its steps."""
    found: dict[str, Any] = {"ours": [], "TRL": [], "loss": []}
    with tempfile.TemporaryDirectory() as inputs:
        make_inputs(Path(inputs), SIZES[column.size])
        for _ in range(rounds):
            found["ours"].append(our_seconds(Path(inputs), column, steps))
            of_trl = trl_steps(Path(inputs), column, steps)
            found["version"] = of_trl["version"]
            found["TRL"].append(median(step["seconds"] for step in of_trl["steps"]))
            found["loss"] += [step["loss"] for step in of_trl["steps"]]
    found["ratio"] = spread([ours / theirs for ours, theirs in zip(found["ours"], found["TRL"], strict=True)])
    return found


def our_seconds(inputs: Path, column: Column, steps: int) -> float:
    """Median seconds of a step of `rlhf run`."""
    with tempfile.TemporaryDirectory() as folder:
        done = run([manifest(inputs, column.algorithm, steps=column.warm_up + steps)], Path(folder))
        return median(record["time/step"] for record in records_of(done / "step", steps=steps))


def trl_steps(inputs: Path, column: Column, steps: int) -> dict[str, Any]:
    """Return the output of `trl_steps.py` without the first steps; SystemExit if TRL did other work than ours."""
    command = [PEERS / "bin" / "python", "-W", "ignore", Path(__file__).with_name("trl_steps.py")]
    done = subprocess.run(
        [*map(str, command), column.algorithm, str(inputs), str(column.warm_up + steps)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(WITH_PPO) if column.algorithm == "PPO" else ""},
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for step in found["steps"]:
        if step["tokens"] != RESPONSES * RESPONSE_TOKENS or step["updates"] != 1:
            raise SystemExit(f"a step of TRL is not the work that is measured: {step}")
    return found | {"steps": found["steps"][column.warm_up :]}


def show(results: Mapping[str, Mapping[str, Any]]) -> None:
    """The table: a column each."""
    table = Table(title=f"seconds a step, medians of each round's median; {host()}")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    for who in ("ours", "TRL"):
        table.add_row(who, *(f"{median(result[who]):.3f}" for result in results.values()))
    table.add_row("ours / TRL", *(ratio(result["ratio"]) for result in results.values()))
    table.add_row("TRL", *(result["version"] for result in results.values()))
    table.add_row("its tokens a step", *(f"{RESPONSES * RESPONSE_TOKENS:,}" for _ in results))
    table.add_row("its optimizer steps a step", *("1" for _ in results))
    table.add_row("its losses", *(f"{min(r['loss']):.3g} to {max(r['loss']):.3g}" for r in results.values()))
    Console(width=110).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of each round, after the first ones")
    options = parser.parse_args(arguments)
    results = {name: measure(COLUMNS[name], rounds=options.rounds, steps=options.steps) for name in options.columns}
    show(results)
    if options.json:
        options.json.write_text(json.dumps({"host": host(), "columns": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
