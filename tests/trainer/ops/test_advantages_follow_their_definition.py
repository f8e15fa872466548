"""GAE against its definition as a sum, by hand and in its limits; rewards per token; shaped scores."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlhf_trainer.ops.advantages import gae, shape_scores, token_rewards

GAMMA, LAM = 0.9, 0.8


def random_case(*, num_rows: int = 4, num_tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """rewards, values, mask [B, T] in float64: prompt, response with gaps and padding differ between rows."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, num_rows, num_tokens, generator=generator, dtype=torch.float64)
    mask = torch.zeros(num_rows, num_tokens, dtype=torch.float64)
    mask[0, 2:7] = 1.0
    mask[1, [1, 2, 5, 6]] = 1.0
    mask[2, :] = 1.0
    mask[3, [0, 8]] = 1.0
    return rewards, values, mask


def by_definition(rewards: list[float], values: list[float]) -> list[float]:
    """A_t = sum over l of (gamma lam)^l delta_{t+l} (eq. 16), term by term, for one response without gaps."""
    after = [*values[1:], 0.0]
    deltas = [r + GAMMA * v_next - v for r, v_next, v in zip(rewards, after, values, strict=True)]
    return [
        sum((GAMMA * LAM) ** (later - t) * deltas[later] for later in range(t, len(deltas))) for t in range(len(deltas))
    ]


def test_values_by_hand() -> None:
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    values = torch.tensor([[9.0, 0.5, 0.6, 0.8]])
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    # gamma 0.5, lam 0.5: delta_3 = 1 - 0.8 = 0.2; delta_2 = 0.4 - 0.6 = -0.2; delta_1 = 0.3 - 0.5 = -0.2
    # A_3 = 0.2; A_2 = -0.2 + 0.25 * 0.2 = -0.15; A_1 = -0.2 - 0.25 * 0.15 = -0.2375
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert_close(advantages, torch.tensor([[0.0, -0.2375, -0.15, 0.2]]))
    assert_close(returns, torch.tensor([[0.0, 0.2625, 0.45, 1.0]]))


def test_every_row_is_the_definition_over_its_masked_tokens() -> None:
    rewards, values, mask = random_case()
    advantages, returns = gae(rewards, values, mask, gamma=GAMMA, lam=LAM)
    for row in range(len(mask)):
        chosen = mask[row] > 0
        expected = by_definition(rewards[row][chosen].tolist(), values[row][chosen].tolist())
        assert advantages[row][chosen].tolist() == pytest.approx(expected, abs=1e-12)
        assert_close(returns[row][chosen], advantages[row][chosen] + values[row][chosen])


def test_both_are_zero_outside_the_mask() -> None:
    rewards, values, mask = random_case()
    for result in gae(rewards, values, mask, gamma=GAMMA, lam=LAM):
        assert result[mask == 0].tolist() == [0.0] * int((mask == 0).sum())


def test_lam_1_gives_returns_and_lam_0_the_one_step_error() -> None:
    rewards, values, _ = random_case()
    mask = torch.ones_like(rewards)
    _, returns = gae(rewards, values, mask, gamma=GAMMA, lam=1.0)
    num_tokens = rewards.shape[1]
    powers = torch.tensor(
        [[GAMMA ** (s - t) if s >= t else 0.0 for t in range(num_tokens)] for s in range(num_tokens)],
        dtype=torch.float64,
    )
    assert_close(returns, rewards @ powers)
    advantages, _ = gae(rewards, values, mask, gamma=GAMMA, lam=0.0)
    following = torch.cat([values[:, 1:], torch.zeros(len(values), 1)], dim=1)
    assert_close(advantages, rewards + GAMMA * following - values)


def test_a_perfect_critic_leaves_no_advantage() -> None:
    rewards, _, _ = random_case()
    mask = torch.ones_like(rewards)
    _, values = gae(rewards, torch.zeros_like(rewards), mask, gamma=GAMMA, lam=1.0)
    advantages, returns = gae(rewards, values, mask, gamma=GAMMA, lam=LAM)
    assert_close(advantages, torch.zeros_like(rewards), atol=1e-12, rtol=0)
    assert_close(returns, values)


@pytest.mark.parametrize("junk", [1e6, math.nan, math.inf])
def test_what_is_outside_the_mask_or_padding_is_not_read(junk: float) -> None:
    rewards, values, mask = random_case()
    expected = gae(rewards, values, mask, gamma=GAMMA, lam=LAM)
    wide = torch.full((len(mask), 3), junk, dtype=torch.float64)
    dirty = [torch.cat([torch.where(mask > 0, x, junk), wide], dim=1) for x in (rewards, values)]
    found = gae(dirty[0], dirty[1], torch.cat([mask, torch.zeros_like(wide)], dim=1), gamma=GAMMA, lam=LAM)
    for before, after in zip(expected, found, strict=True):
        assert_close(after[:, : mask.shape[1]], before, atol=0, rtol=0)
        assert after[:, mask.shape[1] :].abs().sum() == 0.0


def test_rows_do_not_depend_on_their_order_or_micro_batch() -> None:
    case = random_case()
    whole = gae(*case, gamma=GAMMA, lam=LAM)
    order = torch.tensor([3, 1, 0, 2])
    moved = gae(*(x[order] for x in case), gamma=GAMMA, lam=LAM)
    parts = [gae(*(x[rows] for x in case), gamma=GAMMA, lam=LAM) for rows in (slice(0, 1), slice(1, 4))]
    for which in (0, 1):
        assert_close(moved[which], whole[which][order], atol=0, rtol=0)
        assert_close(torch.cat([part[which] for part in parts]), whole[which], atol=0, rtol=0)


def test_rewards_per_token_by_hand() -> None:
    kl = torch.tensor([[9.0, 1.0, 2.0, 4.0], [9.0, -1.0, 3.0, 9.0], [1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    found = token_rewards(torch.tensor([10.0, -10.0, 5.0]), kl, mask, kl_coef=0.5)
    assert found.tolist() == [[0.0, -0.5, -1.0, 8.0], [0.0, 0.5, -11.5, 0.0], [0.0, 0.0, 0.0, 0.0]]


def test_rewards_of_a_row_add_up_to_score_less_kl() -> None:
    _, kl, mask = random_case()
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    expected = scores - 0.3 * (kl * mask).sum(dim=1)
    dirty = torch.where(mask > 0, kl, math.nan)
    assert_close(token_rewards(scores, dirty, mask, kl_coef=0.3).sum(dim=1), expected)


def test_a_score_of_a_row_without_response_is_not_read() -> None:
    assert token_rewards(torch.tensor([math.nan]), torch.zeros(1, 2), torch.zeros(1, 2), kl_coef=0.1).tolist() == [
        [0, 0]
    ]


@pytest.mark.parametrize("as_float", [True, False])
def test_scores_are_normalised_then_clipped_then_penalised(as_float: bool) -> None:
    scores = torch.tensor([3.0, 21.0, -19.0, 21.0])
    ended = torch.tensor([True, True, True, False])
    # mean 1, std 2: 1, 10, -10, 10; clip 5: 1, 5, -5, 5; the last did not end: 5 - 3
    found = shape_scores(
        scores, ended.float() if as_float else ended, mean=1.0, std=2.0, clip=5.0, missing_end_penalty=3.0
    )
    assert_close(found, torch.tensor([1.0, 5.0, -5.0, 2.0]))


def test_scores_without_a_clip_are_only_normalised() -> None:
    found = shape_scores(torch.tensor([21.0]), torch.ones(1), mean=1.0, std=2.0, clip=None, missing_end_penalty=3.0)
    assert_close(found, torch.tensor([10.0]))
