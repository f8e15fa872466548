"""`rlhf run examples/01-helpful-ppo.yaml` on the GPUs of this machine, as users start it; it needs Ray."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.gpu.rung import Rung, main
from tests.repo.tree import ROOT

EXAMPLE = "examples/01-helpful-ppo.yaml"
JOBS = ("helpful-sft", "helpful-rm", "helpful-ppo")


def measure(rung: Rung) -> None:
    """Validate, plan and, on GPUs, run."""
    gpus = 1 if rung.rehearse else min(2, torch.cuda.device_count())
    sets = ["--set", "resources.device=GPU", "--set", f"resources.slotsPerNode={gpus}"]
    with rung.part("validate"):
        _rlhf("validate", EXAMPLE, *sets)
    with rung.part("plan") as found:
        cluster = ["--nodes", "1", "--gpus-per-node", str(gpus), "--gpu", "h100-80g"]
        plans = json.loads(_rlhf("plan", EXAMPLE, *sets, "--json", *(cluster if rung.rehearse else [])))
        found["jobs"] = len(plans)
        assert len(plans) == len(JOBS)
    if rung.rehearse:
        rung.skipped["run"] = "`make demo` runs it on the CPU"
        return
    if importlib.util.find_spec("ray") is None:
        rung.skipped["run"] = "Ray is not installed"
        return
    with rung.part("run") as found:
        _rlhf("run", EXAMPLE, *sets, "--output", str(rung.folder / "run"))
        found.update(_outcome(rung.folder / "run"))


def _rlhf(*arguments: str) -> str:
    command = [sys.executable, "-c", "from rlhf_trainer.commands.cli import main; main()", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, f"rlhf {arguments[0]} exits with {done.returncode}: {done.stdout[-500:]}"
    return done.stdout


def _outcome(output: Path) -> dict[str, Any]:
    """summary.json, and the seconds of the last PPO step by phase."""
    steps = (output / JOBS[-1] / "metrics.jsonl").read_text().splitlines()
    last = json.loads(steps[-1])
    times = {name: round(value, 3) for name, value in last.items() if name.startswith("time/")}
    return {"summary": json.loads((output / "summary.json").read_text()), "last_step": times}


if __name__ == "__main__":
    main(measure, one_rank=False)
