"""VAPO's advantage and objective (arXiv:2504.05118) and CISPO's (arXiv:2506.13585), worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from rlhf_trainer.algorithms.cispo import CISPO
from rlhf_trainer.algorithms.vapo import VAPO
from rlhf_trainer.ops.losses import policy_loss

OURS_VAPO = VAPO(name="VAPO", lambda_length_scale=1.0, whiten_advantages=False)
OURS_CISPO = CISPO(name="CISPO", clip_range_high=0.5)
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])


def vapo(algorithm: VAPO, scores: list[float]) -> dict[str, Tensor]:
    """The advantage for responses of two and three tokens, the reward on the last one, and values of 0.5."""
    rewards = torch.zeros(2, 3)
    rewards[0, 1], rewards[1, 2] = scores
    return algorithm.advantage(
        rewards,
        torch.full((2, 3), 0.5),
        torch.tensor(scores),
        torch.tensor([2.0, 3.0]),
        MASK,
        rows=slice(0, 2),
        whitened=lambda x, _: x,
    )


def test_vapo_by_hand() -> None:
    """Two tokens have lambda 1/2, three have 2/3; errors are 0 and 1 - 0.5 or 0 - 0.5 on the last token."""
    found = vapo(OURS_VAPO, [1.0, 0.0])["advantages"]
    expected = torch.tensor([[0.25, 0.5, 0.0], [-0.5 * 4 / 9, -0.5 * 2 / 3, -0.5]])
    torch.testing.assert_close(found, expected)


def test_vapo_has_no_lambda_below_zero() -> None:
    """With the paper's alpha, 0.05, a response of fewer than 20 tokens learns from one step only."""
    found = vapo(VAPO(name="VAPO", whiten_advantages=False), [1.0, 0.0])["advantages"]
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.5, 0.0], [0.0, 0.0, -0.5]]))


@pytest.mark.parametrize(
    ("scores", "weights"), [([1.0, 0.0], [2.5, 0.0]), ([0.0, 1.0], [0.0, 5 / 3]), ([1.0, 1.0], [1.0, 1.0])]
)
def test_vapo_weighs_right_responses(scores: list[float], weights: list[float]) -> None:
    found = vapo(OURS_VAPO, scores)["token_weights"]
    torch.testing.assert_close(found, torch.tensor(weights)[:, None] * MASK)


@pytest.mark.parametrize("scores", [[0.0, -1.0], [math.nan, 0.0]])
def test_vapo_without_a_right_response_has_no_likelihood_term(scores: list[float]) -> None:
    assert not vapo(OURS_VAPO, scores)["token_weights"].any()


def test_vapo_imitates_by_the_mean_over_right_tokens() -> None:
    """With advantages of 0 the loss is mu * mean over right tokens of -log pi, as equation and aggregation say."""
    log_probs = torch.tensor([[-1.0, -3.0, 9.0], [-2.0, -2.0, -2.0]], requires_grad=True)
    weights = vapo(OURS_VAPO, [1.0, 0.0])["token_weights"]
    found = policy_loss(
        log_probs,
        log_probs.detach(),
        torch.zeros(2, 3),
        MASK,
        clip_ranges=OURS_VAPO.clip_ranges,
        ratio="Token",
        weights=None,
        aggregation="TokenMean",
        normalizer=5.0,
        objective=lambda new, old, advantages, _: OURS_VAPO.objective(new, old, advantages, weights),
    )
    assert found.loss.item() == pytest.approx(0.1 * 2.0)
    found.loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-0.05, -0.05, 0.0], [0.0, 0.0, 0.0]]))


def test_vapo_clips_as_ppo_does() -> None:
    """Ratios of 2, 1 and 1/2, clipped to 0.8 .. 1.28 where that gives less."""
    log_probs = torch.log(torch.tensor([[2.0, 1.0, 0.5]]))
    for sign, expected in ((1.0, [1.28, 1.0, 0.5]), (-1.0, [-2.0, -1.0, -0.8])):
        zero = torch.zeros(1, 3)
        found = OURS_VAPO.objective(log_probs, zero, torch.full((1, 3), sign), zero)
        torch.testing.assert_close(found, torch.tensor([expected]))


def test_vapo_has_the_papers_numbers() -> None:
    ours = VAPO(name="VAPO")
    assert (ours.clip_ranges, ours.gae_lambda, ours.discount, ours.aggregation) == ((0.2, 0.28), 1.0, 1.0, "TokenMean")
    assert (ours.lambda_length_scale, ours.positive_coefficient, ours.kl.coefficient) == (0.05, 0.1, 0.0)
    assert ours.critic_warmup_steps == 50
    assert VAPO.model_validate({"name": "VAPO", "kl": {"estimator": "K3"}}).kl.coefficient == 0.0


def test_cispo_by_hand() -> None:
    """Returns 0, 0, 6: mean 2, deviation sqrt(12)."""
    found = OURS_CISPO.advantage(torch.tensor([0.0, 0.0, 6.0]), group_size=3)
    torch.testing.assert_close(found, torch.tensor([-2.0, -2.0, 4.0]) / math.sqrt(12), atol=1e-5, rtol=0)


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    """Ratios of 4, 1 and 1/2: weights 1.5, 1 and 1/2. The gradient is weight * A, of the clipped token too."""
    old = torch.full((1, 3), -3.0)
    log_probs = (old + torch.log(torch.tensor([[4.0, 1.0, 0.5]]))).requires_grad_()
    advantages = torch.tensor([[1.0, 2.0, -2.0]])
    found = OURS_CISPO.objective(log_probs, old, advantages)
    weights = torch.tensor([[1.5, 1.0, 0.5]])
    torch.testing.assert_close(found, weights * advantages * log_probs)
    found.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(log_probs.grad, weights * advantages)


def test_cispo_has_the_papers_options() -> None:
    ours = CISPO(name="CISPO")
    assert (ours.aggregation, ours.kl.coefficient, ours.compares_responses) == ("TokenMean", 0.0, True)
    assert ours.clip_ranges == (0.99, 5.0)


def test_an_objective_never_reads_outside_the_mask() -> None:
    log_probs = torch.tensor([[0.0, math.inf], [0.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    found = policy_loss(
        log_probs,
        torch.zeros(2, 2),
        torch.full((2, 2), math.nan),
        mask,
        clip_ranges=(0.2, 0.2),
        ratio="Token",
        weights=None,
        aggregation="TokenMean",
        normalizer=2.0,
        objective=lambda new, old, advantages, _: (new - old).exp() * (1.0 + advantages.nan_to_num(7.0)),
    )
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert log_probs.grad is not None
    assert log_probs.grad[:, 1].tolist() == [0.0, 0.0]
