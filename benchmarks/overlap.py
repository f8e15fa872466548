"""Updates of actor and critic on two pools, alone and at the same time: python benchmarks/overlap.py [--json PATH].

The PPO job of benchmarks/work.py on two pools of one CPU slot each; everything is real (Ray, FSDP2). One PPO step runs
up to its advantages; then come, in turn, the update of the actor alone, that of the critic alone, and both. Medians of
one run, which needs a free core for each pool.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from work import SIZES, changed, make_inputs, manifest

from rlhf_api.job import Job
from rlhf_mapper.place import place
from rlhf_trainer.run.session import ray_session
from rlhf_trainer.run.slots import Slots
from rlhf_trainer.run.wiring import RayRuntime
from rlhf_trainer.run_folder.folder import model_folders

WARM_UP = 2
POOLS = [
    {"name": "left", "models": ["actor", "reference"], "slotsPerNode": 1},
    {"name": "right", "models": ["critic"], "slotsPerNode": 1},
]


def job_in(folder: Path) -> Job:
    """The job on two pools, its models and prompts made in the folder."""
    make_inputs(folder, SIZES["0.7M"])
    document = manifest(folder, "PPO", steps=1000)
    return Job.parse(changed(document, {"placement": {"mode": "Manual", "pools": POOLS}}))


def measure(repeats: int) -> dict[str, float]:
    """Median seconds of each update alone, and of both."""
    with tempfile.TemporaryDirectory() as temporary, ray_session(None, cpu_slots=len(POOLS)):
        job = job_in(Path(temporary))
        folders = model_folders(job, Path(temporary))
        placed = place(job, (0,))
        runtime = RayRuntime(job, job.models(), placed, folders, slots=Slots(), path=Path(temporary))
        with runtime.running():
            return seconds_of(runtime, job, repeats)


def seconds_of(runtime: RayRuntime, job: Job, repeats: int) -> dict[str, float]:
    """The medians on running models."""
    models: dict[str, Any] = runtime.models
    batch = models["data"].load_batch(runtime.blank(1, job.sequences_per_step))
    batch = models["actor"].compute_log_prob(models["actor"].generate_sequences(batch))
    batch = models["reference"].compute_log_prob(models["critic"].compute_values(batch))
    batch = models["advantage"].compute_rewards(models["reward"].compute_reward(batch))
    batch = models["advantage"].compute_advantage(batch)
    updates: dict[str, list[Callable[[Any], Any]]] = {
        "actor": [models["actor"].update_actor],
        "critic": [models["critic"].update_critic],
        "both": [models["critic"].update_critic, models["actor"].update_actor],
    }
    runtime.drain()
    found: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(WARM_UP + repeats):
        for name, calls in updates.items():
            began = time.perf_counter()
            for call in calls:
                call(batch)
            runtime.drain()
            found[name].append(time.perf_counter() - began)
    return {name: median(seconds[WARM_UP:]) for name, seconds in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(arguments)
    seconds = measure(options.repeats)
    longer, total = max(seconds["actor"], seconds["critic"]), seconds["actor"] + seconds["critic"]
    results = {**seconds, "of_max": seconds["both"] / longer, "of_sum": seconds["both"] / total}
    table = Table(title="updates on two pools of one slot, medians")
    for column in ("actor alone", "critic alone", "both", "both / max", "both / sum"):
        table.add_column(column, justify="right")
    cells = [f"{seconds[name]:.3f} s" for name in ("actor", "critic", "both")]
    table.add_row(*cells, f"{results['of_max']:.2f}", f"{results['of_sum']:.2f}")
    Console(width=100).print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
