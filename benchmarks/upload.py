"""Steps beside the upload of a checkpoint, on a link that both share: without an upload, unlimited, and paced.

    python benchmarks/upload.py [--rate 200mbit] [--steps N] [--rounds N]

Two networks of this machine are joined by a link that tc limits; it needs root and iproute2. Each holds a rank; a step
computes and then sums gradients over both. The first rank uploads to an S3 server (moto) in the second network, as
trainers do (`UploadFolder`), at the pace that they take from the link that they measure (`link_probe`). Rounds
alternate. Seconds of a step are the mean of those that began while the upload ran.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rlhf_trainer.checkpoint import UploadFolder
from rlhf_trainer.training.link_probe import measure, slowest_network
from rlhf_trainer.upload_pace import SHARE, UploadPace

CARD, ADDRESSES, PORT, STORE = "rlhf0", ("10.251.9.1", "10.251.9.2"), 29511, 29512
GRADIENTS, WIDTH, PRODUCTS = 4_000_000, 512, 60
"""Numbers that a step sums over both ranks, and the products of matrices that it computes before."""
KINDS = ("none", "unlimited", "paced")


def command(*words: str) -> None:
    subprocess.run(words, check=True)


@contextmanager
def networks(rate: str) -> Iterator[list[str]]:
    """Two networks, and the only link between them, which is as slow in both directions."""
    names = [f"rlhf-{os.getpid()}-{each}" for each in "ab"]
    try:
        for name in names:
            command("ip", "netns", "add", name)
        command("ip", "-n", names[0], "link", "add", CARD, "type", "veth", "peer", "name", CARD, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            command("ip", "-n", name, "addr", "add", f"{address}/30", "dev", CARD)
            for card in ("lo", CARD):
                command("ip", "-n", name, "link", "set", card, "up")
            limit = f"root tbf rate {rate} burst 32kb latency 50ms".split()
            command("tc", "-n", name, "qdisc", "add", "dev", CARD, *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def step(gradients: torch.Tensor, matrix: torch.Tensor) -> float:
    began = time.perf_counter()
    for _ in range(PRODUCTS):
        matrix @ matrix
    dist.all_reduce(gradients)
    return time.perf_counter() - began


def steps_beside(sending: Future[None] | None, most: int, gradients: torch.Tensor, matrix: torch.Tensor) -> list[float]:
    """Return the seconds of the steps that begin while the first rank's upload runs, without one of `most` steps."""
    seconds: list[float] = []
    while len(seconds) < most:
        ended = [sending is not None and sending.done()]
        dist.broadcast_object_list(ended)
        if ended[0]:
            break
        seconds.append(step(gradients, matrix))
    return seconds


def upload(pace: UploadPace | None, size: int) -> None:
    folder = UploadFolder("s3://bucket/step-000001/actor", pace)
    (folder.folder / "shard-0.safetensors").write_bytes(os.urandom(size))
    folder.upload()


def rank_main(rank: int, steps: int, rounds: int) -> None:
    """Run the steps of a rank; the first rank uploads, and prints the seconds of its steps by kind of upload."""
    dist.init_process_group("gloo", f"tcp://{ADDRESSES[0]}:{PORT}", rank=rank, world_size=2)
    gradients, matrix = torch.ones(GRADIENTS), torch.ones(WIDTH, WIDTH)
    mesh: Any = SimpleNamespace(groups={"data": dist.group.WORLD})
    speeds: list[Any] = [None, None]
    dist.all_gather_object(speeds, replace(measure(mesh), where=str(rank)))  # both networks have this machine's name
    pace = SHARE * slowest_network(speeds, device="CPU")
    warm = [step(gradients, matrix) for _ in range(7)][2:]
    size = int(pace * steps * median(warm))
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with ThreadPoolExecutor(1) as beside:
        for kind in KINDS * rounds:
            limit = UploadPace(pace) if kind == "paced" else None
            sending = beside.submit(upload, limit, size) if rank == 0 and kind != "none" else None
            seconds[kind] += steps_beside(sending, steps, gradients, matrix)
            if sending:
                sending.result()
            dist.barrier()
    if rank == 0:
        print(json.dumps({"pace": pace, "size": size, "seconds": seconds}))


def measured(names: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """Start the server and both ranks; return what the first rank printed."""
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    address = {"AWS_ENDPOINT_URL": f"http://{ADDRESSES[1]}:{STORE}", "GLOO_SOCKET_IFNAME": CARD}
    inside = [["ip", "netns", "exec", name, sys.executable] for name in names]
    bucket = "import time, fsspec; time.sleep(5); fsspec.filesystem('s3').mkdir('bucket')"
    run = partial(subprocess.Popen, env={**os.environ, **keys, **address}, stdout=subprocess.PIPE)
    server = run([*inside[1], "-m", "moto.server", "-H", "0.0.0.0", "-p", str(STORE)], stderr=subprocess.DEVNULL)
    try:
        run([*inside[0], "-c", bucket]).wait()
        ranks = [run([*program, __file__, "--rank", str(rank), *options]) for rank, program in enumerate(inside)]
        found: dict[str, Any] = json.loads(ranks[0].communicate()[0])
        return found
    finally:
        server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given.rank, given.steps, given.rounds)
        return
    with networks(given.rate) as names:
        found = measured(names, ["--steps", str(given.steps), "--rounds", str(given.rounds)])
    usual = {of: of(found["seconds"]["none"]) for of in (mean, median)}
    print(f"{given.rate}: {found['size'] / 1e6:.1f} MB are uploaded, paced with {found['pace'] / 1e6:.2f} MB/s")
    for kind, seconds in found["seconds"].items():
        ratios = ", ".join(f"{of.__name__} {of(seconds):.3f} s ({of(seconds) / usual[of]:.3f})" for of in usual)
        took = f"{ratios}, longest {max(seconds):.3f} s"
        print(f"{kind:>9}: {len(seconds):4} steps, {took}")


if __name__ == "__main__":
    main()
