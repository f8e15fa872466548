"""A step's rows follow from the seed and the step alone: for any ranks, after any resume, in every epoch."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlhf_api.spec.data import DataSource
from rlhf_trainer.data.loaders import CompletionLoader, Loader, PairLoader, PromptLoader
from tests.trainer.unit.data.conftest import spec_of

Write = Callable[[Sequence[Mapping[str, object]]], DataSource]
Make = Callable[..., Loader]
COUNT = 10
ROWS = [{"prompt": "p" * (i + 1), "chosen": "c" * (2 * i % 7), "rejected": "r" * (3 * i % 5)} for i in range(COUNT)]


@pytest.fixture
def make(write: Write, plain: PreTrainedTokenizerFast) -> Make:
    def loader(
        kind: type[Loader] = PromptLoader,
        seed: int = 3,
        total_epochs: int | None = None,
        *,
        endless: bool = False,
        rows: Sequence[Mapping[str, object]] = ROWS,
    ) -> Loader:
        spec = spec_of(50, 50, seed=seed, total_epochs=total_epochs)
        return kind(write(rows), plain, path="spec.data.train", spec=spec, endless=endless)

    return loader


def examples(loader: Loader, *steps: int, batch_size: int) -> list[int]:
    """The examples of these steps that are valid, one after the other."""
    batches = [loader.batch(step, batch_size=batch_size) for step in steps]
    return [int(example) for batch in batches for example in batch["example"][batch["valid"] > 0]]


def test_a_digest_tells_another_row_or_order(make: Make) -> None:
    digest = make(PairLoader).digest
    assert make(PairLoader, seed=4).digest == digest
    edited = [*ROWS[:-1], {**ROWS[-1], "rejected": "rrr"}]
    moved = [{**ROWS[0], "chosen": "cc"}, {**ROWS[1], "chosen": ""}, *ROWS[2:]]
    for rows in (edited, moved, ROWS[1:], [ROWS[1], ROWS[0], *ROWS[2:]]):
        assert make(PairLoader, rows=rows).digest != digest


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 25])
def test_every_epoch_is_another_permutation(make: Make, batch_size: int) -> None:
    loader = make(total_epochs=5)
    steps = -(-5 * COUNT // batch_size)
    seen = examples(loader, *range(1, steps + 1), batch_size=batch_size)
    epochs = [tuple(seen[start : start + COUNT]) for start in range(0, 5 * COUNT, COUNT)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(COUNT))] * 5
    assert len({*epochs, tuple(range(COUNT))}) == 6
    assert len(seen) == 5 * COUNT


def test_the_order_does_not_depend_on_the_batch_size(make: Make) -> None:
    loader = make()
    assert examples(loader, 1, 2, 3, batch_size=4) == examples(loader, 1, 2, batch_size=6)


def test_another_seed_is_another_order(make: Make) -> None:
    assert examples(make(seed=3), 1, batch_size=COUNT) == examples(make(seed=3), 1, batch_size=COUNT)
    assert examples(make(seed=3), 1, batch_size=COUNT) != examples(make(seed=4), 1, batch_size=COUNT)


@pytest.mark.parametrize("kind", [PromptLoader, CompletionLoader, PairLoader])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("step", [1, 2, 3], ids=lambda step: f"step {step}")
def test_the_slices_of_the_ranks_are_the_batch(make: Make, kind: type[Loader], ranks: int, step: int) -> None:
    whole = make(kind, total_epochs=1).batch(step, batch_size=4)
    bounds = [4 * rank // ranks for rank in range(ranks + 1)]
    parts = [
        make(kind, total_epochs=1).batch(step, batch_size=4, rows=slice(start, stop))
        for start, stop in pairwise(bounds)
    ]
    assert set(kind.fields) <= set(whole)
    for name, tensor in whole.items():
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), tensor, rtol=0, atol=0)


def test_a_resumed_run_sees_what_it_would_have_seen(make: Make) -> None:
    first, resumed = make(), make()
    for step in range(1, 7):
        first.batch(step, batch_size=4)
    for name, tensor in first.batch(7, batch_size=4).items():
        assert torch.equal(tensor, resumed.batch(7, batch_size=4)[name])


def test_the_last_short_batch_repeats_its_row_0_as_padding(make: Make) -> None:
    loader = make(total_epochs=1)
    batch = loader.batch(3, batch_size=4)
    assert batch["valid"].tolist() == [1, 1, 0, 0]
    assert batch["example"][2:].tolist() == batch["example"][[0, 0]].tolist()
    assert batch["example"][0] != batch["example"][1]
    assert Counter(examples(loader, 1, 2, 3, batch_size=4)) == Counter(range(COUNT))
    assert loader.batch(3, batch_size=4, rows=slice(3, 4))["example"].tolist() == batch["example"][[0]].tolist()


def test_without_epochs_no_batch_is_short(make: Make) -> None:
    batch = make().batch(3, batch_size=4)
    assert batch["valid"].tolist() == [1, 1, 1, 1]
    assert batch["example"][:2].tolist() == make(total_epochs=1).batch(3, batch_size=4)["example"][:2].tolist()


def test_an_endless_loader_goes_on_after_the_epochs_of_the_job(make: Make) -> None:
    loader = make(total_epochs=1, endless=True)
    assert loader.batch(3, batch_size=4)["valid"].tolist() == [1, 1, 1, 1]
    assert examples(loader, 3, 4, batch_size=4) == examples(make(), 3, 4, batch_size=4)


@pytest.mark.parametrize("step", [0, 4], ids=lambda step: f"step {step}")
def test_a_step_that_has_no_row_is_an_error(make: Make, step: int) -> None:
    with pytest.raises(ValueError, match=f"no step {step}"):
        make(total_epochs=1).batch(step, batch_size=4)


def test_rows_beyond_the_batch_are_an_error(make: Make) -> None:
    with pytest.raises(AssertionError, match="of 4 rows"):
        make().batch(1, batch_size=4, rows=slice(2, 5))


def prompts_of(batch: Mapping[str, Tensor]) -> list[int]:
    return batch["prompt_mask"].sum(1).int().tolist()


@pytest.mark.parametrize("padding", [0, 2, 6])
def test_evaluation_is_in_the_order_of_the_file(make: Make, padding: int) -> None:
    batch = make().ordered(slice(0, COUNT + padding))
    assert batch["valid"].tolist() == [1] * COUNT + [0] * padding
    assert batch["example"].tolist() == [*range(COUNT), *[0] * padding]
    assert prompts_of(batch) == [*range(1, COUNT + 1), *[1] * padding]


def test_ranks_share_an_evaluation(make: Make) -> None:
    loader = make()
    whole = loader.ordered(slice(0, 12))
    parts = [loader.ordered(slice(start, start + 4)) for start in (0, 4, 8)]
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), tensor)
