"""Changes are sent without loss, and in few bytes where few elements have changed."""

import pytest
import torch
from torch import Tensor

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.generation.checksum import bit_sum
from rlhf_trainer.hybrid_engine.delta import FULL_EVERY, Changes, decode, encoded
from rlhf_trainer.hybrid_engine.exchange import Exchange
from rlhf_trainer.hybrid_engine.layout import describe
from rlhf_trainer.hybrid_engine.reshard_plan import Parties, plan
from rlhf_trainer.tensor_slice import TensorSlice
from tests.each import each_case
from tests.trainer.hybrid_engine.families import config
from tests.trainer.ranks import run_kept_ranks

MODEL = describe(config("qwen2", tied=True))
CPU = torch.device("cpu")


def bits(tensor: Tensor) -> list[int]:
    return tensor.view(torch.uint8).tolist()


def changed(old: Tensor, share: float) -> Tensor:
    """The tensor with about this share of its elements drawn anew."""
    chosen = torch.rand(old.numel()) < share
    return torch.where(chosen, torch.randn(old.numel()).to(old.dtype), old)


@each_case("dtype", [torch.bfloat16, torch.float16, torch.float32])
@each_case("count", [0, 1, 7, 8, 9, 1000])
@each_case("share", [0.0, 0.04, 0.5, 1.0])
def test_what_is_decoded_is_what_was_encoded(dtype: torch.dtype, count: int, share: float) -> None:
    torch.manual_seed(count)
    old = torch.randn(count).to(dtype)
    new, known = changed(old, share), old.clone()
    decode(encoded(new, old), known)
    assert bits(known) == bits(new)
    decode(encoded(new, None), fresh := torch.empty_like(old))
    assert bits(fresh) == bits(new)


def test_elements_are_compared_by_their_bits() -> None:
    """A zero that changed its sign has changed, and a NaN that did not has not."""
    old = torch.tensor([0.0, float("nan"), 1.0] * 100)
    new = old.clone()
    new[0] = -0.0
    message = encoded(new, old)
    assert int(message[:8].view(torch.int64)) == 1
    decode(message, old)
    assert bits(old) == bits(new)


def test_few_changes_are_few_bytes_and_many_are_no_more_than_all() -> None:
    torch.manual_seed(0)
    old = torch.randn(100_000).to(torch.bfloat16)
    sizes = {share: len(encoded(changed(old, share), old)) / old.nbytes for share in (0.04, 1.0)}
    assert sizes[0.04] == pytest.approx(1 / 16 + 0.04, abs=0.005)
    assert sizes[1.0] == pytest.approx(1.0, abs=0.001)


def received(steps: int, sends_changes: bool) -> list[tuple[int, dict[str, list[int]]]]:
    """Bytes of each of several exchanges from ranks 0 and 1 to rank 2, and what it then has."""
    parties = Parties(
        training=ParallelSizes(data=2),
        sources=range(2),
        generation=ParallelSizes(data=1),
        destinations=range(2, 3),
        nodes=[0, 0, 1],
    )
    rank = torch.distributed.get_rank()
    own = plan(MODEL, parties, rank)
    exchange = Exchange(own, dtype=torch.bfloat16, bucket_bytes=(4096, 4096), device=CPU, sends_changes=sends_changes)
    torch.manual_seed(1)
    full = {parameter.name: torch.randn(parameter.shape) for parameter in MODEL}
    found = []
    for _ in range(steps):
        held = {name: full[name][part.within(TensorSlice.whole(full[name].shape))] for name, part in own.held.items()}
        kept = {name: torch.zeros(part.shape, dtype=torch.bfloat16) for name, part in own.wanted.items()}
        for name, part, piece in exchange.pieces(held):
            kept[name][part.within(own.wanted[name])] = piece
        exchange.verify({name: bit_sum(weight) for name, weight in kept.items()})
        found.append((exchange.stats.received, {name: bits(weight.flatten()) for name, weight in kept.items()}))
        full = {name: changed(weight.flatten(), 0.04).view(weight.shape) for name, weight in full.items()}
    return found


def test_a_pool_has_the_same_bits_from_all_or_from_changes() -> None:
    whole, changes = (run_kept_ranks(3, received, 3, each)[2] for each in (False, True))
    assert [weights for _, weights in changes] == [weights for _, weights in whole]
    assert changes[0][0] > whole[0][0]
    assert all(0 < one < 0.2 * other for (one, _), (other, _) in zip(changes[1:], whole[1:], strict=True))
    assert len({str(weights) for _, weights in whole}) == 3, "else nothing would be compared"


def sent(times: int) -> list[int]:
    """Bytes of each of several exchanges of 64 elements that do not change, between two ranks."""
    changes, values = Changes(None), torch.ones(64)
    found = []
    for _ in range(times):
        work, (bytes_sent, _), is_whole = changes.exchange(0, values, torch.empty(64), [[128, 128], [128, 128]])
        work.wait()
        assert is_whole == (bytes_sent > 64 * 4)
        found.append(bytes_sent)
    return found


def test_every_so_often_everything_is_sent() -> None:
    sizes = run_kept_ranks(2, sent, FULL_EVERY + 1)[0]
    assert [number for number, size in enumerate(sizes) if size > 64 * 4] == [0, FULL_EVERY]
