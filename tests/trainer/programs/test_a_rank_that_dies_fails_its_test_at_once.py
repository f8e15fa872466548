"""The other ranks wait for one that died; the test must not wait with them, and must learn how it ended."""

import os
import signal
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.trainer.ranks import RankServer


@pytest.fixture(scope="module")
def server() -> RankServer:
    """One that starts quickly: these ranks do not train."""
    return RankServer(import_collectives)


def import_collectives() -> None:
    import rlhf_trainer.training.distributed  # noqa: F401


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
def test_a_rank_that_ends_badly_is_named(function: Callable[[], None], sentence: str, server: RankServer) -> None:
    with pytest.raises(AssertionError, match=sentence):
        server.run(2, function)


def test_ranks_are_forked_again_afterwards(server: RankServer) -> None:
    assert server.run(2, dist.get_rank) == [0, 1]


def test_kept_ranks_stay_until_one_of_them_fails(server: RankServer) -> None:
    first = server.run(2, os.getpid, keep=True)
    assert server.run(2, os.getpid, keep=True) == first
    assert not set(server.run(2, os.getpid)) & set(first)
    with pytest.raises(AssertionError, match="a sentence of rank 1"):
        server.run(2, wrong_on_rank_1, keep=True)
    assert not set(server.run(2, os.getpid, keep=True)) & set(first)


def test_kept_ranks_see_the_environment_of_each_call(server: RankServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("one", "another"):
        monkeypatch.setenv("OF_A_TEST", value)
        assert server.run(2, os.getenv, "OF_A_TEST", keep=True) == [value] * 2
