"""Masked sums, means, whitening and the last token: values by hand, and NaN, inf and padding outside a mask."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlhf_trainer.ops.masks import keep, last_token, masked_sum, row_sums, whiten
from tests.each import each_case

X = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
MASK = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])


def poisoned(x: Tensor, mask: Tensor, poison: float) -> Tensor:
    return torch.where(mask > 0, x, torch.full_like(x, poison))


def test_sums_and_means_are_those_worked_out_by_hand() -> None:
    assert masked_sum(X, MASK).item() == 2.0 + 4.0 + 16.0
    assert row_sums(X, MASK).tolist() == [6.0, 16.0]


def test_an_empty_mask_sums_to_zero() -> None:
    assert masked_sum(X, torch.zeros_like(X)).item() == 0.0
    assert row_sums(X, torch.zeros_like(X)).tolist() == [0.0, 0.0]


def test_whitening_takes_the_mean_and_std_it_is_given() -> None:
    # mean 2 and std 2: (2-2)/2, (4-2)/2, (16-2)/2
    assert_close(whiten(X, MASK, mean=2.0, std=2.0), torch.tensor([[0.0, 0.0, 1.0], [0.0, 7.0, 0.0]]))


def test_whitening_gives_mean_zero_and_std_one() -> None:
    chosen = X[MASK > 0]
    white = whiten(X, MASK, mean=chosen.mean(), std=chosen.std(correction=0))[MASK > 0]
    assert_close(white.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    assert_close(white.std(correction=0), torch.tensor(1.0))


def test_whitening_equal_numbers_does_not_divide_by_zero() -> None:
    assert whiten(torch.full((1, 3), 5.0), torch.ones(1, 3), mean=5.0, std=0.0).tolist() == [[0.0, 0.0, 0.0]]


@each_case(
    ("mask", "expected"),
    [
        ([0, 1, 1, 0], [0, 0, 1, 0]),
        ([1, 1, 1, 1], [0, 0, 0, 1]),
        ([1, 0, 0, 0], [1, 0, 0, 0]),
        ([1, 0, 1, 0], [0, 0, 1, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
    ],
    ids=["padded", "full", "first only", "with a gap", "empty"],
)
def test_the_last_token_of_a_row(mask: list[float], expected: list[float]) -> None:
    others = [1.0, 1.0, 0.0, 0.0]
    found = last_token(torch.tensor([others, mask], dtype=torch.float32))
    assert found.tolist() == [[0.0, 1.0, 0.0, 0.0], [float(e) for e in expected]]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_outside_the_mask_reach_nothing(poison: float) -> None:
    x = poisoned(X, MASK, poison).requires_grad_()
    total = masked_sum(x, MASK) + row_sums(x, MASK).sum() + whiten(x, MASK, mean=0.0, std=1.0).sum()
    assert total.item() == pytest.approx(3 * 22.0)
    (gradient,) = torch.autograd.grad(total, x)
    assert_close(gradient, 3.0 * MASK)


def test_what_is_kept_is_unchanged_and_the_rest_is_exactly_zero() -> None:
    assert keep(X, MASK).tolist() == [[0.0, 2.0, 4.0], [0.0, 16.0, 0.0]]


def test_micro_batches_and_padding_leave_the_sum_alone() -> None:
    whole = masked_sum(X, MASK)
    shares = [masked_sum(X[row : row + 1], MASK[row : row + 1]) for row in (0, 1)]
    assert_close(torch.stack(shares).sum(), whole)
    padded, padded_mask = (torch.cat([part, torch.zeros(2, 5)], dim=1) for part in (X, MASK))
    assert_close(masked_sum(padded, padded_mask), whole)
