"""The other ranks wait for one that died; the test must not wait with them, and must learn how it ended."""

import os
import signal
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.trainer.ranks import run_ranks


def killed_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    dist.barrier()


def wrong_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("a sentence of rank 1")
    dist.barrier()


@pytest.mark.parametrize(
    ("function", "sentence"),
    [(killed_on_rank_1, "rank 1 ended with SIGABRT"), (wrong_on_rank_1, "a sentence of rank 1")],
)
def test_a_rank_that_ends_badly_is_named(function: Callable[[], None], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        run_ranks(2, function)


def test_ranks_are_forked_again_afterwards() -> None:
    assert run_ranks(2, dist.get_rank) == [0, 1]
