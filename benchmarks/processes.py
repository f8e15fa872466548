"""CPU seconds of the processes of examples/01-helpful-ppo.yaml, shortened, by what they are.

A process is looked at ten times a second, so of each the last tenth of a second may be missing.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

MANIFEST = Path(__file__).parents[1] / "examples" / "01-helpful-ppo.yaml"
SHORT = [
    "--set=helpful-sft:training.totalSteps=30",
    "--set=helpful-rm:training.totalSteps=20",
    "--set=helpful-ppo:training.totalSteps=3",
    "--set=evaluation.data.limit=45",
]
LOOK_SECONDS = 0.1
KINDS = {
    "ray::SlotProcess": "slot",
    "ray::IDLE": "worker that Ray starts in advance",
    "vllm.model_executor.models.registry": "vLLM's look at a model's class",
    "rlhf_trainer.rewards.function": "a user's function",
}
"""Part of a command line -> what the process is; any other but the driver is Ray's."""


def main() -> int:
    began = time.monotonic()
    seconds: dict[tuple[str, int, float], float] = {}
    with tempfile.TemporaryDirectory() as output:
        run = ["run", str(MANIFEST), f"--output={output}/run", *SHORT]
        root = psutil.Popen([sys.executable, "-m", "rlhf_trainer", *run])
        while root.poll() is None:
            with suppress(psutil.Error):
                look(root, seconds)
            time.sleep(LOOK_SECONDS)
    table = Table("processes", "how many", "CPU seconds", title=f"{time.monotonic() - began:.0f} s")
    found: dict[str, list[float]] = defaultdict(list)
    for (kind, *_), spent in seconds.items():
        found[kind].append(spent)
    for kind, each in sorted(found.items(), key=lambda item: -sum(item[1])):
        table.add_row(kind, str(len(each)), f"{sum(each):.1f}")
    table.add_row("all", str(len(seconds)), f"{sum(seconds.values()):.1f}")
    Console().print(table)
    return int(root.returncode)


def look(root: psutil.Popen, seconds: dict[tuple[str, int, float], float]) -> None:
    """Note the CPU time of the driver and of all below it."""
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.Error):
            line, spent = " ".join(process.cmdline()), process.cpu_times()
            if not line:  # it is ending
                continue
            others = "driver" if process.pid == root.pid else "Ray's own"
            kind = next((KINDS[part] for part in KINDS if part in line), others)
            key = (process.pid, process.create_time())
            for known in [known for known in seconds if known[1:] == key]:
                del seconds[known]  # Ray renames a process when it becomes a slot's
            seconds[(kind, *key)] = spent.user + spent.system


if __name__ == "__main__":
    sys.exit(main())
