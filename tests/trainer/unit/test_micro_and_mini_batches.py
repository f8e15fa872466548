"""Cutting a batch changes neither what is in it nor, for mini-batches, what belongs together."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_api.spec.job_spec import Training
from rlhf_trainer.training import batching
from rlhf_trainer.training.batching import assign_mini_batches, micro_batches, mini_batches
from rlhf_trainer.types import Batch
from tests.each import each_case

LENGTHS = torch.tensor([3, 9, 1, 9, 4, 2, 7])


@each_case(("budget", "at_least"), [(1, 1), (9, 1), (12, 1), (18, 1), (1000, 1), (1000, 4), (1000, 9)])
def test_every_row_is_in_one_micro_batch_in_the_budget(budget: int, at_least: int) -> None:
    groups = micro_batches(LENGTHS, token_budget=budget, at_least=at_least)
    assert sorted(torch.cat(groups).tolist()) == list(range(len(LENGTHS)))
    assert len(groups) >= at_least
    for rows in groups:
        assert len(rows) == 1 or int(LENGTHS[rows].sum()) <= budget


def test_micro_batches_are_few_and_hold_about_as_many_tokens() -> None:
    expected = {1000: [35], 18: [17, 18], 12: [11, 12, 12], 7: [5, 5, 7, 9, 9], 1: [1, 2, 3, 4, 7, 9, 9]}
    for budget, tokens in expected.items():
        groups = micro_batches(LENGTHS, token_budget=budget)
        assert sorted(int(LENGTHS[rows].sum()) for rows in groups) == tokens


def test_without_rows_there_is_no_micro_batch() -> None:
    assert micro_batches(torch.zeros(0, dtype=torch.int64), token_budget=9, at_least=2) == []


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


@each_case("trained", ["0111", "0001", "1011", "0000"])
def test_a_left_out_row_is_in_no_mini_batch(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "rows_of_all_ranks", lambda rows, *_: rows)  # all rows are this rank's
    rows = torch.tensor([each == "1" for each in trained])
    batch = Batch(step=1, start=0, size=4, fields={})
    mesh: Any = SimpleNamespace(data_group=None)
    parts = list(mini_batches(rows, batch, Training(total_steps=1, prompt_batch_size=4), mesh, size=2))
    assert sum((part.long() for part in parts), torch.zeros(4, dtype=torch.int64)).tolist() == rows.long().tolist()
    assert all(part.any() for part in parts)
