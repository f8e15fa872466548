"""Cutting a batch changes neither what is in it nor, for mini-batches, what belongs together."""

import pytest
import torch

from rlhf_trainer.training.micro_batches import even_micro_batches, micro_batches, padding_waste
from rlhf_trainer.training.mini_batches import assign_mini_batches

LENGTHS = torch.tensor([3, 9, 1, 9, 4, 2, 7])


@pytest.mark.parametrize("budget", [1, 9, 18, 20, 1000])
def test_every_row_is_in_exactly_one_micro_batch_within_the_budget(budget: int) -> None:
    groups = micro_batches(LENGTHS, token_budget=budget)
    assert sorted(torch.cat(groups).tolist()) == list(range(len(LENGTHS)))
    for rows in groups:
        assert len(rows) == 1 or len(rows) * int(LENGTHS[rows].max()) <= budget


def test_rows_of_like_length_share_a_micro_batch() -> None:
    groups = micro_batches(LENGTHS, token_budget=18)
    assert [LENGTHS[rows].tolist() for rows in groups] == [[9, 9], [7, 4], [3, 2, 1]]


@pytest.mark.parametrize(
    ("budget", "stages", "rows"), [(1000, 2, 4), (18, 2, 2), (1, 4, 1), (1000, 4, 2), (1000, 9, 1)]
)
def test_a_pipelines_micro_batches_have_one_shape_within_the_budget(budget: int, stages: int, rows: int) -> None:
    groups = even_micro_batches(LENGTHS, token_budget=budget, at_least=stages)
    assert sorted(torch.cat(groups).tolist()) == list(range(len(LENGTHS)))
    assert len(groups) >= min(stages, len(LENGTHS))
    assert [len(each) for each in groups[:-1]] == [rows] * (len(groups) - 1)
    assert padding_waste(LENGTHS, groups, even=True) == (len(groups) * rows * 9 - 35, len(groups) * rows * 9)


def test_padding_waste_counts_the_tokens_that_are_not_there() -> None:
    groups = micro_batches(LENGTHS, token_budget=18)
    assert padding_waste(LENGTHS, groups) == (0 + 3 + 3, 18 + 14 + 9)


def test_mini_batches_are_the_same_for_any_number_of_ranks() -> None:
    rows = torch.arange(24)
    whole = assign_mini_batches(rows, count=3, seed=1, step=5, epoch=0)
    for ranks in (2, 4, 8):
        parts = [assign_mini_batches(part, count=3, seed=1, step=5, epoch=0) for part in rows.chunk(ranks)]
        assert torch.equal(torch.cat(parts), whole)


def test_each_rank_has_as_many_rows_in_every_mini_batch() -> None:
    for part in torch.arange(24).chunk(2):
        assert torch.bincount(assign_mini_batches(part, count=3, seed=1, step=5, epoch=0)).tolist() == [4, 4, 4]


def test_mini_batches_differ_between_steps_and_epochs() -> None:
    rows = torch.arange(64)
    first = assign_mini_batches(rows, count=4, seed=1, step=1, epoch=0)
    assert not torch.equal(first, assign_mini_batches(rows, count=4, seed=1, step=1, epoch=1))
    assert not torch.equal(first, assign_mini_batches(rows, count=4, seed=1, step=2, epoch=0))
    assert not torch.equal(first, assign_mini_batches(rows, count=4, seed=2, step=1, epoch=0))
    assert torch.equal(first, assign_mini_batches(rows, count=4, seed=1, step=1, epoch=0))
