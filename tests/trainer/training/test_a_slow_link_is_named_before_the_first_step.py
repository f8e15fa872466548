"""Links and devices are timed before the first step; one of less than half the usual speed is named."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.training import link_probe
from rlhf_trainer.training.distributed import ModelMesh
from rlhf_trainer.training.link_probe import PRODUCT, Speeds, look_at_links, measure
from tests.trainer.ranks import run_ranks

SLOW, SECONDS = 2, 0.5


def probed(slows: str) -> Speeds:
    """What a rank measures in groups of four and of two ranks, of which one sends, or computes, slowly."""
    link_probe.ROUNDS = 2
    begin, multiply = dist.batch_isend_irecv, torch.matmul

    def slowly(*given: Any, **more: Any) -> object:
        time.sleep(SECONDS)
        return (begin if slows == "link" else multiply)(*given, **more)

    if dist.get_rank() == SLOW and slows == "link":
        dist.batch_isend_irecv = slowly  # type: ignore[assignment]
    if dist.get_rank() == SLOW and slows == "device":
        torch.matmul = slowly  # type: ignore[assignment]
    return replace(measure(ModelMesh(ParallelSizes(data=2, tensor=2))), where=f"pod-{dist.get_rank()}")


@pytest.fixture(autouse=True)
def _no_shared_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is known who is slow, so less than a second shows it."""
    monkeypatch.setitem(link_probe.MIN_EXCESS, "CPU", SECONDS / 2)


def test_a_rank_that_sends_slowly_is_named() -> None:
    said, slow = look_at_links(run_ranks(4, probed, "link"), device="CPU")
    assert "all_reduce/data" in said
    assert "gather/tensor" in said
    ends = [each.partition(" takes ")[0] for each in slow]
    assert "the link from rank 2 (pod-2) to rank 3 (pod-3) in a tensor group" in ends
    assert "the link from rank 2 (pod-2) to rank 0 (pod-0) in a data group" in ends


def test_a_rank_that_computes_slowly_is_named() -> None:
    _, slow = look_at_links(run_ranks(4, probed, "device"), device="CPU")
    assert [each.partition(" computes ")[0] for each in slow if " computes " in each] == ["rank 2 (pod-2)"]


def test_links_within_and_between_machines_are_not_compared() -> None:
    """A ring over two machines of four ranks has six fast links and two slow ones."""
    ranks = [
        Speeds(
            rank=rank,
            where=f"pod-{rank // 4}",
            seconds={PRODUCT: 1.0},
            links={"data": ((rank - 1) % 8, 0.003 if rank % 4 == 0 else 0.0003)},
        )
        for rank in range(8)
    ]
    assert look_at_links(ranks, device="GPU")[1] == []
    ranks[6] = replace(ranks[6], links={"data": (5, 0.001)})
    assert [each.partition(" takes ")[0] for each in look_at_links(ranks, device="GPU")[1]] == [
        "the link from rank 5 (pod-1) to rank 6 (pod-1) in a data group"
    ]


def test_half_the_speed_is_the_limit_on_gpus() -> None:
    ranks = [Speeds(rank=rank, where="here", seconds={PRODUCT: 1.0}, links={"data": (0, 1.0)}) for rank in range(4)]
    assert look_at_links(ranks, device="GPU") == ({PRODUCT: 1.0}, [])
    ranks[1] = replace(ranks[1], seconds={PRODUCT: 2.1}, links={"data": (0, 2.1)})
    assert look_at_links(ranks, device="GPU")[1] == [
        "rank 1 (here) computes 2.1 times as slowly as the others",
        "the link from rank 0 (here) to rank 1 (here) in a data group takes 2.1 s, others 1 s",
    ]
