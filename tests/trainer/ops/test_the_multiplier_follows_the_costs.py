"""The Lagrange multiplier by hand, and what it does to rewards and costs."""

import math

import pytest
import torch
from torch.testing import assert_close

from rlhf_api.spec.algorithms import Lagrange
from rlhf_trainer.algorithms.safe_rlhf import SafeRLHF
from tests.each import each_case

SAFE = SafeRLHF(
    name="SafeRLHF", cost_limit=1.0, lagrange=Lagrange(learning_rate=0.1, maximum=5.0), whiten_advantages=False
)


@each_case(
    ("cost", "expected"),
    [
        (3.0, 2.0 * math.exp(0.1 * 2.0 * 2.0)),  # 2 above the limit
        (1.0, 2.0),
        (0.0, 2.0 * math.exp(-0.1 * 2.0)),
        (1e9, 5.0),
        (-1e9, 1e-6),
    ],
)
def test_it_grows_while_the_cost_is_above_the_limit(cost: float, expected: float) -> None:
    assert SAFE.next_multiplier(2.0, cost=cost) == pytest.approx(expected)


@pytest.mark.parametrize("cost_values", [torch.zeros(2, 1), None])
def test_reward_less_cost_by_hand(cost_values: torch.Tensor | None) -> None:
    """Responses of one token and values of 0: an advantage is the reward, or the cost."""
    rewards, costs, ones = torch.tensor([[4.0], [1.0]]), torch.tensor([[1.0], [-2.0]]), torch.ones(2, 1)
    safe = SAFE.model_copy(update={"separate_cost_critic": cost_values is not None})
    rewards = rewards if cost_values is not None else safe.weigh(rewards, costs, 3.0)
    found = safe.advantage(
        rewards, 0.0 * ones, costs, ones, multiplier=3.0, whitened=lambda x, _: x, cost_values=cost_values
    )
    assert_close(found, torch.tensor([[0.25], [1.75]]))
