"""`python -m tests.real_size [NAME ...]`: the bytes of a step of each case, on rank 0, and whether it fits its GPU.

`--json` prints one JSON object instead of the table. Exit code 1 if a case does not fit.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from transformers.utils import logging

from tests.real_size.cases import CASES, MAPPED
from tests.real_size.live_bytes import KINDS, LiveBytes
from tests.real_size.shapes import GPU_BYTES, USABLE
from tests.real_size.step import Case, measure

GB = 1e9
EVERY = {**CASES, **MAPPED}
MEMORY = "/dev/shm"
"""Where sparse files cost nothing: a disk's file system reads megabytes ahead of each byte of them."""


def row_of(case: Case, live: LiveBytes, seconds: float) -> dict[str, Any]:
    """What was measured, in GB, as JSON."""
    phases = {
        name: {
            "peak": round(phase.peak / GB, 2),
            "after": round(phase.after / GB, 2),
            "host_after": round(phase.host_after / GB, 2),
            "kinds": {
                kind: round(phase.kinds[kind] / GB, 2) for kind in KINDS if phase.kinds.get(kind, 0) > 0.005 * GB
            },
            "largest": round(phase.largest / GB, 2),
            "host_peak": round(phase.host_peak / GB, 2),
            "collectives": dict(phase.collectives),
            "collective_gb": {name: round(size / GB, 2) for name, size in phase.collective_bytes.items()},
            "waits": phase.waits,
        }
        for name, phase in live.phases.items()
    }
    step = [phase.peak for name, phase in live.phases.items() if not name.startswith("load")]
    return {
        "shape": case.shape,
        "algorithm": case.algorithm,
        "ranks": case.ranks,
        "layout": dict(case.layout),
        "peak": round(max(step) / GB, 2),
        "bound": USABLE * GPU_BYTES / GB,
        "fits": max(step) <= USABLE * GPU_BYTES,
        "phases": phases,
        "seconds": round(seconds, 1),
    }


def table(name: str, row: dict[str, Any]) -> str:
    """The row of a case, a line a phase."""
    verdict = "fits" if row["fits"] else "DOES NOT FIT"
    lines = [f"{name}: {row['peak']} GB of {row['bound']:.1f} ({verdict}), counted in {row['seconds']} s"]
    for phase, measured in row["phases"].items():
        kinds = ", ".join(f"{kind} {size}" for kind, size in measured["kinds"].items())
        calls = sum(measured["collectives"].values())
        moved = sum(measured["collective_gb"].values())
        lines.append(f"  {phase:22} {measured['peak']:7.2f} GB  {calls:5} collectives {moved:8.2f} GB  {kinds}")
    return "\n".join(lines)


def main() -> int:
    """Measure the cases that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.real_size", description=__doc__)
    known = f"one of {', '.join(EVERY)}; default: all but mapped-*"
    parser.add_argument("names", nargs="*", metavar="NAME", help=known)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.names) - set(EVERY):
        parser.error(f"{min(unknown)} is none of {', '.join(EVERY)}")
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    gc.freeze()  # modules and their classes stay: what is collected after each phase are tensors
    rows = {}
    for name in options.names or CASES:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=MEMORY if Path(MEMORY).is_dir() else None) as folder:
            live = measure(EVERY[name], Path(folder))
        rows[name] = row_of(EVERY[name], live, time.monotonic() - began)
        if not options.json:
            print(table(name, rows[name]), flush=True)
    if options.json:
        print(json.dumps(rows))
    return int(not all(row["fits"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
