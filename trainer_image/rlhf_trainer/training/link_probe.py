"""Measurement of devices and links before the first step: one slow link would slow down every step."""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from statistics import median_low

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_trainer.training.distributed import Device, ModelMesh, device_here

ROUNDS = 3
"""Number of measurements, of which the fastest counts; one before them sets up the connections."""
BYTES, WIDTH = {"cuda": 64 * 2**20, "cpu": 2**18}, {"cuda": 4096, "cpu": 256}
"""Bytes of a message, and rows of the square matrices of a product, by device."""
SLOWER = 2.0
"""Multiple of the median seconds above which a device or link counts as slow."""
MIN_EXCESS: dict[Device, float] = {"GPU": 0.0, "CPU": 1.0}
"""Seconds above the median from which slowness is named: CPUs are shared, and a rank may just wait for a core."""
PRODUCT = "product"


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Seconds that a rank has measured, each the fastest of some rounds."""

    rank: int
    where: str
    """Host name of the rank's machine; on a cluster `POD on NODE`."""
    seconds: Mapping[str, float]
    """Seconds by name: a product of matrices; an all-reduce and a gather in the group of each axis of the layout."""
    links: Mapping[str, tuple[int, float]]
    """Axis -> (rank of the world before this one in the group's ring, seconds until its message has arrived)."""


def measure(mesh: ModelMesh) -> Speeds:
    """Measure the device of this rank and its links in every group of a mesh. A collective of the pool."""
    device = device_here()
    matrix = torch.ones(WIDTH[device.type], WIDTH[device.type], device=device)
    product = torch.empty_like(matrix)
    seconds, links = {PRODUCT: _fastest(partial(torch.matmul, matrix, matrix, out=product), product)}, {}
    for axis, group in mesh.groups.items():
        seconds[f"all_reduce/{axis}"], seconds[f"gather/{axis}"], *link = _measure_group(group, device)
        links[axis] = dist.get_global_rank(group, int(link[0])), link[1]
    where = " on ".join(filter(None, (socket.gethostname(), os.environ.get("RLHF_NODE"))))
    return Speeds(rank=dist.get_rank(), where=where, seconds=seconds, links=links)


def _measure_group(group: dist.ProcessGroup, device: torch.device) -> tuple[float, float, int, float]:
    """Return seconds of an all-reduce and a gather, and (rank before this one in the group, seconds of its message)."""
    size, place = dist.get_world_size(group), dist.get_rank(group)
    before, after = (place - 1) % size, (place + 1) % size
    whole = torch.ones(BYTES[device.type] // (4 * size) * size, device=device)
    part, arrived = whole[: len(whole) // size].clone(), torch.empty_like(whole)

    reduce = partial(dist.all_reduce, whole, group=group)
    gather = partial(dist.all_gather_into_tensor, arrived, part, group=group)

    def pass_on() -> None:
        sent = dist.P2POp(dist.isend, whole, group=group, group_peer=after)
        came = dist.P2POp(dist.irecv, arrived, group=group, group_peer=before)
        for work in dist.batch_isend_irecv([came, sent]):
            work.wait()

    passed = _fastest(pass_on, arrived, group)
    return _fastest(reduce, whole, group), _fastest(gather, arrived, group), before, passed


def look_at_links(ranks: Sequence[Speeds], *, device: Device) -> tuple[dict[str, float], list[str]]:
    """Return (the slowest rank's seconds by name, a sentence for each device or link of less than half the speed).

    Speed is compared with the pool's median of the kind: products, or an axis's links within or between machines.
    """
    slowest = {name: max(each.seconds[name] for each in ranks) for name in ranks[0].seconds}
    places = {each.rank: f"rank {each.rank} ({each.where})" for each in ranks}
    usual = median_low(each.seconds[PRODUCT] for each in ranks)
    found = [
        f"{places[each.rank]} computes {taken / usual:.1f} times as slowly as the others"
        for each in ranks
        if _is_slow(taken := each.seconds[PRODUCT], usual, device)
    ]
    machines = {each.rank: each.where for each in ranks}
    links: dict[tuple[str, bool], list[tuple[int, int, float]]] = {}
    for each in ranks:
        for axis, (before, taken) in each.links.items():
            links.setdefault((axis, machines[before] == each.where), []).append((before, each.rank, taken))
    for (axis, _), of_kind in links.items():
        usual = median_low(taken for *_, taken in of_kind)
        found += [
            f"the link from {places[before]} to {places[rank]} in a {axis} group takes {taken:.2g} s, "
            f"others {usual:.2g} s"
            for before, rank, taken in of_kind
            if _is_slow(taken, usual, device)
        ]
    return slowest, found


def slowest_network(ranks: Sequence[Speeds], *, device: Device) -> float:
    """Return the bytes per second of the slowest link between two machines; inf if the ranks share one machine."""
    machines = {each.rank: each.where for each in ranks}
    links = [link for each in ranks for link in each.links.values() if machines[link[0]] != each.where]
    sent = BYTES["cuda" if device == "GPU" else "cpu"]
    return min((sent / taken for _, taken in links), default=inf)


def _is_slow(taken: float, usual: float, device: Device) -> bool:
    return taken > SLOWER * usual and taken - usual > MIN_EXCESS[device]


def _fastest(run: Callable[[], object], result: Tensor, group: dist.ProcessGroup | None = None) -> float:
    """Return the seconds of the fastest round until its result can be read; ranks of a group begin it together."""
    taken, one = [], result.new_ones(1)
    for _ in range(1 + ROUNDS):
        if group:
            dist.all_reduce(one, group=group)
        one.item()
        began = time.perf_counter()
        run()
        result.view(-1)[-1].item()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])
