"""The backend by which tests on CPUs meet NCCL's ends: same results as gloo, and no error when a rank is lost."""

import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from tests.trainer.nccl_site.nccl_like import NcclLikeGroup
from tests.trainer.ranks import run_ranks

SECONDS = 1


def joined(seconds: float = 600) -> NcclLikeGroup:
    """A group of all ranks."""
    store = PrefixStore("stand-in", distributed_c10d._get_default_store())
    return NcclLikeGroup(store, dist.get_rank(), dist.get_world_size(), timedelta(seconds=seconds))


def collectives() -> list[bool]:
    """Whether each collective leaves what gloo's does."""
    group, rank, size = joined(), dist.get_rank(), dist.get_world_size()
    same = []
    for call in (
        lambda out, given, group: dist.all_reduce(out.copy_(given), group=group),
        lambda out, given, group: dist.all_gather_single(out, given[: len(out) // size], group=group),
        lambda out, given, group: dist.reduce_scatter_single(out[: len(out) // size], given, group=group),
        lambda out, given, group: dist.all_to_all_single(out, given, group=group),
        lambda out, given, group: dist.all_to_all_single(out, given, group=group, async_op=True).wait(),
        lambda out, given, group: dist.broadcast(out.copy_(given), group_src=1, group=group),
    ):
        of_both = [torch.zeros(4), torch.zeros(4)]
        for out, each in zip(of_both, (group, None), strict=True):
            call(out, torch.arange(4.0) + 10 * rank, each)  # type: ignore[no-untyped-call]
        same.append(of_both[0].equal(of_both[1]))
    return same


def test_its_results_are_those_of_gloo() -> None:
    assert run_ranks(2, collectives) == [[True] * 6] * 2


def aborted() -> str:
    """Rank 0 waits for the other one, which does not come, until a thread aborts the group."""
    group = joined()
    if dist.get_rank():
        return ""
    threading.Timer(0.5, group.abort).start()
    dist.all_reduce(torch.ones(1), group=group)
    with pytest.raises(ValueError, match="Process group") as raised:  # torch's, which looks for the group's name
        dist.all_reduce(torch.ones(1), group=group)
    return str(raised.value.__context__)


def test_an_abort_ends_what_waits_and_then_raises() -> None:
    assert run_ranks(2, aborted)[0] == "NCCL communicator was aborted on rank 0."


def left_alone() -> None:
    """Rank 1 dies, and rank 0 waits for it."""
    group = joined(SECONDS)
    dist.all_reduce(torch.ones(1), group=group)
    if dist.get_rank():
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1), group=group)


def test_a_watchdog_ends_who_waits_too_long() -> None:
    """Not an error of the collective: that is what gloo would have raised."""
    with pytest.raises(AssertionError, match="rank 1 ended with SIGKILL\nrank 0 ended with SIGABRT"):
        run_ranks(2, left_alone)
