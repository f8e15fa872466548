"""Seconds of a step beside what this machine needs at least, and what each change brings: python benchmarks/step.py.

    python benchmarks/step.py [--json PATH] [--columns COLUMN ...] [--changes CHANGE ...] [--rounds N] [--steps N]
                              [--precision BF16]

The work is that of `work`; everything is real (Ray, FSDP2, vLLM). In each round `rlhf run` trains one job with the
defaults and one for each change that is taken back, one after the other, and then `limit` measures. Ratios are made
within a round; what stands behind them is their range over the rounds. The table is printed after each round.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from limit import limit_of, unavoidable
from rich.console import Console
from rich.table import Table
from work import (
    COLUMNS,
    PHASES,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    RESPONSES,
    SIZES,
    Column,
    changed,
    host,
    make_inputs,
    manifest,
    medians,
    ratio,
    records_of,
    run,
    spread,
)

DEFAULT = "default"
WITHOUT: dict[str, dict[str, dict[str, Any]]] = {
    "one-slot": {"resources": {"slotsPerNode": 2}},
    "small-micro-batches": {"training": {"microBatchTokens": 16384}},
    "one-scoring": {"training": {"oldLogProbs": "Recompute"}},
    "shared-prompts": {"training": {"sharePrompts": False}},
}
"""Each change, and what a manifest says to go without it: 2 slots of a thread each instead of one slot with a thread a
core; a forward pass over all rows of a step; old log-probabilities computed a second time; the prompt of a group
computed for each of its responses.
"""
NOT_IN = {"one-scoring": "PPO", "shared-prompts": "PPO", "small-micro-batches": "0.7M"}
"""Changes, and the algorithm or size without them: PPO's rewards need the old log-probabilities, it has one response to
a prompt here, and the micro-batches of the small models have room for all rows.
"""
Round = dict[str, list[dict[str, float]]]
"""The records of each job."""


def measure(
    columns: Sequence[Column], changes: Sequence[str], *, rounds: int, steps: int, precision: str
) -> Iterator[dict[str, dict[str, Any]]]:
    """After each round, the figures of the columns in all rounds so far."""
    sizes = {column.size: [each.algorithm for each in columns if each.size == column.size] for column in columns}
    with tempfile.TemporaryDirectory() as root:
        found: dict[str, dict[str, Any]] = {}
        for size in sizes:
            (Path(root) / size).mkdir()
            found[size] = {"parameters": make_inputs(Path(root) / size, SIZES[size]), "rounds": [], "limits": []}
        for _ in range(rounds):
            for size, algorithms in sizes.items():
                inputs = Path(root) / size
                found[size]["rounds"].append(
                    {
                        name: one_round(inputs, Column(name, size), changes, steps=steps, precision=precision)
                        for name in algorithms
                    }
                )
                found[size]["limits"].append(limit_of(inputs, precision))
            yield {str(column): column_of(found[column.size], column) for column in columns}


def one_round(inputs: Path, column: Column, changes: Sequence[str], *, steps: int, precision: str) -> Round:
    """Train the job with the defaults, and without each of the changes."""
    taken_back = [name for name in changes if NOT_IN.get(name) not in column]
    variants = {DEFAULT: {}, **{name: WITHOUT[name] for name in taken_back}}
    jobs = [
        changed(
            changed(
                manifest(inputs, column.algorithm, steps=column.warm_up + steps, name=name),
                {"training": {"precision": precision}},
            ),
            change,
        )
        for name, change in variants.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        done = run(jobs, Path(folder))
        return {name: records_of(done / name, steps=steps) for name in variants}


def column_of(found: Mapping[str, Any], column: Column) -> dict[str, Any]:
    """The figures of a column: seconds, and ratios as (median, lowest, highest) of the rounds."""
    rounds: list[Round] = [each[column.algorithm] for each in found["rounds"]]
    limits = [unavoidable(column.algorithm, each) for each in found["limits"]]
    seconds = [{name: medians(records)["step"] for name, records in each.items()} for each in rounds]
    return {
        "parameters": found["parameters"],
        "steps": sum(len(each[DEFAULT]) for each in rounds),
        "seconds": medians([record for each in rounds for record in each[DEFAULT]]),
        "limit": median(limits),
        "of_limit": spread([each[DEFAULT] / limit for each, limit in zip(seconds, limits, strict=True)]),
        "without": {
            name: spread([each[name] / each[DEFAULT] for each in seconds]) for name in seconds[0] if name != DEFAULT
        },
    }


def show(results: Mapping[str, Mapping[str, Any]], precision: str) -> None:
    """The table: a column each."""
    work = f"{RESPONSES} responses, prompt {PROMPT_TOKENS}, response {RESPONSE_TOKENS} tokens, {precision}; {host()}"
    table = Table(title=f"seconds a step, medians; {work}")
    table.add_column("")
    for name, result in results.items():
        table.add_column(f"{name}\n{result['parameters'] / 1e6:.1f} M, {result['steps']} steps", justify="right")
    for phase in (*PHASES, "step"):
        table.add_row(phase, *(f"{result['seconds'][phase]:.3f}" for result in results.values()))
    table.add_section()
    table.add_row("limit", *(f"{result['limit']:.3f}" for result in results.values()))
    table.add_row("step / limit", *(ratio(result["of_limit"]) for result in results.values()))
    table.add_section()
    for change in WITHOUT:
        found = [result["without"].get(change) for result in results.values()]
        if any(found):
            table.add_row(f"without {change} / step", *(ratio(each) if each else "-" for each in found))
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--changes", nargs="*", choices=WITHOUT, default=list(WITHOUT))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of each job and round, after the first ones")
    parser.add_argument("--precision", choices=("FP32", "BF16"), default="FP32")
    options = parser.parse_args(arguments)
    columns = [COLUMNS[name] for name in options.columns]
    for results in measure(
        columns, options.changes, rounds=options.rounds, steps=options.steps, precision=options.precision
    ):
        show(results, options.precision)
        if options.json:
            options.json.write_text(json.dumps({"host": host(), "columns": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
