"""OPO's advantage against its closed form, worked out by hand (arXiv:2505.23585)."""

import pytest
import torch

from rlhf_trainer.algorithms.opo import OPO

OURS = OPO(name="OPO")


def advantage(returns: list[float], lengths: list[float], group_size: int) -> list[float]:
    found = OURS.advantage(torch.tensor(returns), torch.tensor(lengths), group_size=group_size)
    return [round(each, 5) for each in found.tolist()]


def test_opo_by_hand() -> None:
    """Returns 1, 3, 5 of 4, 2, 2 tokens: (4 + 6 + 10) / 8 = 2.5. Returns 2, 0, 6 of 1, 1, 3: (2 + 0 + 18) / 5 = 4."""
    found = advantage([1.0, 3.0, 5.0, 2.0, 0.0, 6.0], [4.0, 2.0, 2.0, 1.0, 1.0, 3.0], 3)
    assert found == [-1.5, 0.5, 2.5, -2.0, -4.0, 2.0]


def test_equal_lengths_give_the_mean() -> None:
    assert advantage([1.0, 3.0, 5.0], [7.0, 7.0, 7.0], 3) == [-2.0, 0.0, 2.0]


def test_a_prompt_without_a_response_gives_numbers() -> None:
    """As in the rows that fill up a short last batch."""
    assert advantage([0.0, 0.0], [0.0, 0.0], 2) == [0.0, 0.0]


def test_the_baseline_has_the_least_variance() -> None:
    """sum_i l_i (R_i - b)^2 is least at b, as section 3.2 derives it."""
    returns, lengths = torch.tensor([1.0, 4.0, -2.0, 0.5]), torch.tensor([3.0, 1.0, 6.0, 2.0])
    best = float(returns[0] - OURS.advantage(returns, lengths, group_size=4)[0])
    spread = [float((lengths * (returns - b) ** 2).sum()) for b in (best - 0.01, best, best + 0.01)]
    assert spread[1] == min(spread)


def test_the_defaults_are_the_papers() -> None:
    assert (OURS.kl.coefficient, OURS.entropy_coefficient, OURS.aggregation) == (0.0, 0.0, "FixedLength")
    assert OURS.compares_responses


@pytest.mark.parametrize("scale", [2.0, 0.5])
def test_only_the_proportions_of_lengths_matter(scale: float) -> None:
    lengths = [4.0, 2.0, 2.0]
    assert advantage([1.0, 3.0, 5.0], [scale * each for each in lengths], 3) == advantage([1.0, 3.0, 5.0], lengths, 3)
