"""A rank's process gives the memory of freed tensors back to the system, also where smaller ones stay between them."""

import os
import subprocess
import sys

from rlhf_trainer.run.session import VARIABLES

SCRIPT = """
import gc, os, torch

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

first = torch.ones(31 * 2**18)  # 31 MiB: glibc's own threshold grows to that when it is freed
del first
before, layers, between = resident(), [], []
for _ in range(20):
    layers.append(torch.ones(4 * 2**20))  # 16 MiB
    between.append(torch.ones(2**16))
held = resident() - before
del layers
gc.collect()
print(held, resident() - before)
"""
MIB = 2**20


def memory(environment: dict[str, str]) -> tuple[int, int]:
    """Bytes of 20 tensors of 16 MiB, with small ones between them, and what is left when only these are alive."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "LD_PRELOAD"))}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env={**clean, **environment}, check=True, capture_output=True, text=True)
    held, left = map(int, done.stdout.split())
    return held, left


def test_freed_tensors_leave_no_holes_in_the_heap() -> None:
    held, left = memory(VARIABLES["CPU"])
    assert held > 300 * MIB
    assert left < 30 * MIB
