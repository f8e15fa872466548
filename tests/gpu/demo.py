"""`rlhf run examples/01-helpful-ppo.yaml` on the GPUs of this machine, as users start it; it needs Ray.

A rehearsal runs the chain's first job alone, for two steps on the CPU.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.gpu.rung import Rung, main
from tests.repo.tree import ROOT

EXAMPLE = "examples/01-helpful-ppo.yaml"
RUN_SECONDS, STOP_SECONDS = 220, 20
"""Longest time of the run on GPUs, and of its end after a signal."""
JOBS = ("helpful-sft", "helpful-rm", "helpful-ppo")


def measure(rung: Rung) -> None:
    """Validate, plan and run."""
    gpus = 1 if rung.rehearse else min(2, torch.cuda.device_count())
    sets = ["--set", "resources.device=GPU", "--set", f"resources.slotsPerNode={gpus}"]
    with rung.part("validate"):
        _rlhf("validate", EXAMPLE, *sets)
    with rung.part("plan") as found:
        cluster = ["--nodes", "1", "--gpus-per-node", str(gpus), "--gpu", "h100-80g"]
        plans = json.loads(_rlhf("plan", EXAMPLE, *sets, "--json", *(cluster if rung.rehearse else [])))
        found["jobs"] = len(plans)
        assert len(plans) == len(JOBS)
    if importlib.util.find_spec("ray") is None:
        rung.skipped["run"] = "Ray is not installed"
        return
    output = rung.folder / "run"
    with rung.part("run"):
        if rung.rehearse:
            _rlhf("run", str(_first_job(rung.folder)), "--output", str(output))
        else:
            _rlhf("run", EXAMPLE, *sets, "--output", str(output), seconds=RUN_SECONDS)
    with rung.part("jobs") as found:  # also after a run that failed
        for job in JOBS:
            if (records := output / job / "metrics.jsonl").exists():
                found[job] = _steps_of(records)
        if (summary := output / "summary.json").exists():
            found["summary"] = json.loads(summary.read_text())


def _first_job(folder: Path) -> Path:
    """The chain's first job with two steps, on one CPU slot."""
    job = next(yaml.safe_load_all((ROOT / EXAMPLE).read_text()))
    job["spec"] |= {"resources": {"device": "CPU", "slotsPerNode": 1}}
    job["spec"]["training"]["totalSteps"] = 2
    path = folder / "first.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def _rlhf(*arguments: str, seconds: float | None = None) -> str:
    """Run the command and return what it prints; after so many seconds it is asked to stop, as a job is."""
    command = [sys.executable, "-c", "from rlhf_trainer.commands.cli import main; main()", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(STOP_SECONDS)
        raise
    assert process.returncode == 0, f"rlhf {arguments[0]} exits with {process.returncode}: {printed[-500:]}"
    return printed


def _steps_of(records: Path) -> dict[str, Any]:
    """The number of steps, and the seconds of the last one by phase."""
    steps = records.read_text().splitlines()
    times = {name: round(value, 3) for name, value in json.loads(steps[-1]).items() if name.startswith("time/")}
    return {"steps": len(steps), "last_step": times}


if __name__ == "__main__":
    main(measure, one_rank=False)
