"""The three aggregations by hand, and as shares of the global batch."""

import pytest
import torch
from torch.testing import assert_close

from rlhf_api.spec.algorithms import Aggregation
from rlhf_trainer.ops.aggregation import aggregate, weight_of

MAX_TOKENS = 4
X = torch.tensor([[9.0, 1.0, 2.0, 3.0], [9.0, 10.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
MASK = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
# responses of 3 tokens (sum 6, mean 2) and of 1 (10); the third row is padding
EXPECTED: dict[Aggregation, tuple[float, float]] = {
    "TokenMean": (4.0, 16 / 4),
    "SequenceMean": (2.0, (2 + 10) / 2),
    "FixedLength": (8.0, 16 / (2 * MAX_TOKENS)),
}


@pytest.mark.parametrize("aggregation", EXPECTED)
def test_values_by_hand(aggregation: Aggregation) -> None:
    weight, mean = EXPECTED[aggregation]
    normalizer = weight_of(MASK, aggregation=aggregation, max_tokens=MAX_TOKENS)
    assert normalizer.item() == weight
    assert aggregate(X, MASK, aggregation=aggregation, normalizer=normalizer).item() == mean


@pytest.mark.parametrize("aggregation", EXPECTED)
def test_shares_of_rows_add_up_and_padding_adds_nothing(aggregation: Aggregation) -> None:
    weight, mean = EXPECTED[aggregation]
    wide = [torch.cat([x, torch.zeros(3, 5)], dim=1) for x in (X, MASK)]
    parts = [(wide[0][rows], wide[1][rows]) for rows in ([2, 1], [0])]
    weights = [weight_of(mask, aggregation=aggregation, max_tokens=MAX_TOKENS) for _, mask in parts]
    assert sum(weights) == weight
    shares = [aggregate(x, mask, aggregation=aggregation, normalizer=weight) for x, mask in parts]
    assert_close(torch.stack(shares).sum(), torch.tensor(mean))


def test_a_gradient_stays_clean_where_a_row_has_no_token() -> None:
    x = torch.full((2, 2), torch.nan, requires_grad=True)
    share = aggregate(x, torch.zeros(2, 2), aggregation="SequenceMean", normalizer=1.0)
    (gradient,) = torch.autograd.grad(share, x)
    assert share.item() == 0.0
    assert gradient.tolist() == [[0.0, 0.0], [0.0, 0.0]]
