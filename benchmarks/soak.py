"""Whether a long run grows or slows down: PPO steps of the small model of benchmarks/work.py, in pieces.

    python benchmarks/soak.py FOLDER [--steps 2000] [--svg PATH]

Looks at all processes of the run every few steps, and says for each how much memory (RSS), handles and threads it
wins; of the machine the same of shared memory. Ctrl-C ends a piece: the same command goes on, and without a step left
only shows what was found. Each piece has processes of its own, whose first steps are not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import linear_regression, median
from typing import Any, TextIO

import psutil
import yaml
from rich.console import Console
from rich.table import Table
from work import SIZES, changed, make_inputs, manifest

EVERY, WARM_UP, WINDOW = 10, 100, 100
"""Steps between two looks; steps of a piece that are not counted; steps at both ends whose times are compared."""
SMALL: Mapping[str, Mapping[str, Any]] = {
    "data": {"maxResponseTokens": 16},
    "rollout": {"minResponseTokens": 16},
    "training": {"promptBatchSize": 8},
    "resources": {"slotsPerNode": 2},
    "checkpoint": {"everySteps": 50},
}
KINDS = {
    "SlotProcess": "rank",
    "gcs_server": "Ray's GCS",
    "raylet/raylet": "raylet",
    "rlhf_trainer.rewards.function": "reward",
}
"""Part of a command line -> what the process is; any other but the driver is an agent of Ray's."""
UNITS = {"MB": 1e6, "handles": 1, "threads": 1}
Look = dict[str, Any]


def work(folder: Path, steps: int) -> None:
    """Run until all steps are done, or Ctrl-C; writes a line of `soak.jsonl` for each process looked at."""
    if not (folder / "prompts.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_inputs(folder, SIZES["0.7M"])
    (folder / "job.yaml").write_text(yaml.safe_dump(changed(manifest(folder, "PPO", steps=steps), SMALL)))
    command = [
        sys.executable,
        "-m",
        "rlhf_trainer",
        "run",
        str(folder / "job.yaml"),
        f"--output={folder}/run",
    ]
    with (folder / "log").open("a") as log:
        run = psutil.Popen(command, cwd=Path(__file__).parent, stdout=log, stderr=log)
    with (folder / "soak.jsonl").open("a") as file, suppress(KeyboardInterrupt):
        watch(run, folder / "run" / "step" / "metrics.jsonl", file)
    with suppress(psutil.NoSuchProcess):
        run.terminate()
    run.wait()


def watch(run: psutil.Popen, metrics: Path, file: TextIO) -> None:
    """Write what is seen every few steps, until the run ends."""
    looked = None
    while run.poll() is None:
        time.sleep(0.2)
        done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if looked is None or done >= looked + EVERY:
            looked = done
            file.writelines(json.dumps({"step": done, "run": run.pid, **look}) + "\n" for look in looks(run))
            file.flush()


def looks(run: psutil.Process) -> Iterator[Look]:
    """Return the memory of each process of a run, and the machine's shared memory."""
    numbered: Counter[str] = Counter()
    for process in [run, *sorted(run.children(recursive=True), key=lambda child: child.pid)]:
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            kind = "controller" if process is run else next((KINDS[part] for part in KINDS if part in line), "agent")
            if kind in ("rank", "reward", "agent"):
                numbered[kind] += 1
                kind = f"{kind} {numbered[kind] - 1}"
            held = {"MB": process.memory_info().rss, "handles": process.num_fds(), "threads": process.num_threads()}
            yield {"process": kind, **{name: value / UNITS[name] for name, value in held.items()}}
    yield {"process": "/dev/shm", "MB": psutil.disk_usage("/dev/shm").used / 1e6}


def slopes(found: Sequence[Look]) -> dict[str, dict[str, tuple[float, float]]]:
    """Process -> unit -> (median held, what it wins in 1,000 steps), over the counted steps of all pieces."""
    begun: dict[int, int] = {}
    for line in found:
        begun.setdefault(line["run"], line["step"])
    counted = [line for line in found if line["step"] >= begun[line["run"]] + WARM_UP]
    result: defaultdict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for process, unit in product(dict.fromkeys(line["process"] for line in counted), UNITS):
        mine = [line for line in counted if line["process"] == process and unit in line]
        pieces = [[(line["step"], line[unit]) for line in mine if line["run"] == run] for run in begun]
        if pieces := [piece for piece in pieces if len(piece) > 1]:
            result[process][unit] = median(value for piece in pieces for _, value in piece), slope(pieces)
    return result


def slope(pieces: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Return the growth in 1,000 steps: the slopes of the pieces, weighted by their steps."""
    weights = [piece[-1][0] - piece[0][0] for piece in pieces]
    each = [linear_regression(*zip(*piece, strict=True)).slope for piece in pieces]
    return 1000 * sum(weight * found for weight, found in zip(weights, each, strict=True)) / sum(weights)


def show(folder: Path, svg: Path | None) -> None:
    """Print what was found, and draw the memory of each process by step."""
    found = [json.loads(line) for line in (folder / "soak.jsonl").read_text().splitlines()]
    times = [json.loads(line)["time/step"] for line in (folder / "run/step/metrics.jsonl").read_text().splitlines()]
    table = Table(title=f"{len(times)} steps in {len({line['run'] for line in found})} pieces")
    for column in ("process", *(f"{unit}, in 1,000 steps" for unit in UNITS)):
        table.add_column(column, justify="left" if column == "process" else "right")
    for process, units in slopes(found).items():
        cells = [f"{units[unit][0]:.0f} {units[unit][1]:+.2f}" if unit in units else "" for unit in UNITS]
        table.add_row(process, *cells)
    Console(width=110).print(table)
    if len(times) >= WARM_UP + 2 * WINDOW:
        first, last = median(times[WARM_UP : WARM_UP + WINDOW]), median(times[-WINDOW:])
        print(f"median step: {first:.3f} s after warm-up, {last:.3f} s at the end ({last / first - 1:+.1%})")
    if svg:
        draw(found, svg)


def draw(found: Sequence[Look], svg: Path) -> None:
    """The memory of each process by step."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "soak"
    figure, axes = plt.subplots(figsize=(8, 4))
    for process in dict.fromkeys(line["process"] for line in found):
        mine = [line for line in found if line["process"] == process]
        axes.plot([line["step"] for line in mine], [line["MB"] for line in mine], label=process)
    axes.set(xlabel="step", ylabel="MB", yscale="log")
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(svg, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args()
    with suppress(subprocess.CalledProcessError):
        work(given.folder.resolve(), given.steps)
    show(given.folder, given.svg)


if __name__ == "__main__":
    main()
