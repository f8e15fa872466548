"""Training over a thin line: SFT of the example's model by two replicas, in two network namespaces with a slow link.

    sudo python benchmarks/thin_line.py [--rate 16mbit] [--steps 200]

The same job runs with whole gradients and with `training.gradientCompression: TopK`. It prints the bytes that rank 0
sent over the link in the whole run, the median seconds of a step and the held-out loss at the end, and TopK's divided
by the others. Exit code 1 if TopK sends more than 0.05 of the bytes, a step takes more than 0.25 of the seconds, or the
losses differ by more than 1 %. Needs root for `ip netns` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE, JOB = ROOT / "examples" / "01-helpful-ppo.yaml", "helpful-sft"
SPACES, LINK, ADDRESSES = ("rlhf-thin-0", "rlhf-thin-1"), "thin", ("10.77.0.1", "10.77.0.2")
"""Network namespaces of the ranks, and the name and addresses of the link in each."""
MOST_BYTES, MOST_SECONDS, MOST_LOSS = 0.05, 0.25, 0.01


class Measured(NamedTuple):
    """What a run took."""

    sent: int
    """Bytes that rank 0 sent over the link."""
    seconds: float
    """Median seconds of a step."""
    loss: float


@contextmanager
def thin_line(rate: str) -> Iterator[None]:
    """Make the namespaces and the link between them, of this rate in both directions."""
    try:
        for space in SPACES:
            _run("ip", "netns", "add", space)
        ends = (f"name {LINK} netns {space}".split() for space in SPACES)
        _run("ip", "link", "add", *next(ends), "type", "veth", "peer", *next(ends))
        for space, address in zip(SPACES, ADDRESSES, strict=True):
            inside = ("ip", "netns", "exec", space)
            _run(*inside, "ip", "address", "add", f"{address}/24", "dev", LINK)
            for device in (LINK, "lo"):
                _run(*inside, "ip", "link", "set", device, "up")
            limit = f"tbf rate {rate} burst 32kbit latency 400ms".split()
            _run(*inside, "tc", "qdisc", "add", "dev", LINK, "root", *limit)
        yield
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def measure(compression: str, steps: int, folder: Path) -> Measured:
    """Run the job on both ranks."""
    sets = {
        "models.actor.parallelism": "{data: 2, replicas: 2}",
        "training.totalSteps": str(steps),
        "training.gradientCompression": compression,
    }
    options = [part for path, value in sets.items() for part in ("--set", f"{JOB}:{path}={value}")]
    world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
    world |= {"GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "rlhf_trainer.spmd", "sft", str(EXAMPLE), f"--output={folder}", *options]
    before = _sent()
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", space, *program],
            env=os.environ | world | {"RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank, space in enumerate(SPACES)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        sys.exit(f"the run with {compression} failed")
    rows = [json.loads(line) for line in (folder / JOB / "metrics.jsonl").read_text().splitlines()]
    loss = json.loads((folder / "summary.json").read_text())[JOB]["loss"]
    return Measured(_sent() - before, median(row["time/step"] for row in rows if "time/step" in row), loss)


def _sent() -> int:
    return int(_run("ip", "netns", "exec", SPACES[0], "cat", f"/sys/class/net/{LINK}/statistics/tx_bytes"))


def main() -> int:
    """Print a line for each run, and the ratios; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="16mbit", help="Rate of the link, as tc reads it.")
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    found = []
    with thin_line(asked.rate), tempfile.TemporaryDirectory() as folder:
        for compression in ("None", "TopK"):
            found.append(measure(compression, asked.steps, Path(folder) / compression))
            print("{}: {:,} bytes, {:.3f} s a step, held-out loss {:.4f}".format(compression, *found[-1]), flush=True)
    whole, part = found
    sent, seconds, loss = (of_part / of_whole for of_part, of_whole in zip(part, whole, strict=True))
    print(f"TopK / None: bytes {sent:.3f}, seconds of a step {seconds:.3f}, loss {loss:.4f}")
    return int(sent > MOST_BYTES or seconds > MOST_SECONDS or abs(loss - 1) > MOST_LOSS)


if __name__ == "__main__":
    sys.exit(main())
