"""Every loss: by hand, by finite differences, and unmoved by padding, order, micro-batches and what the mask hides."""

import math
from functools import partial
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, pad
from torch.testing import assert_close

from rlhf_api.spec.algorithms import Estimator
from rlhf_trainer.ops.losses import (
    PolicyLoss,
    kl_loss,
    pair_loss,
    policy_loss,
    sft_loss,
    sign_loss,
    value_loss,
)
from tests.each import each_case

NUM_TOKENS = 11
Case = tuple[Tensor, Tensor, Tensor, Tensor]


def _ppo(x: Tensor, y: Tensor, z: Tensor, m: Tensor, n: float | Tensor, **options: Any) -> PolicyLoss:
    return policy_loss(x, y, z, m, normalizer=n, **options)


def _kl(x: Tensor, y: Tensor, m: Tensor, n: float | Tensor, **options: Any) -> Tensor:
    return kl_loss(x, y, m, normalizer=n, **options)


class Loss(Protocol):
    """A loss of a trained, another and a target tensor under a mask, each [B, T]."""

    def __call__(self, x: Tensor, y: Tensor, z: Tensor, m: Tensor, n: float | Tensor = NUM_TOKENS) -> Tensor: ...


ppo = partial(_ppo, clip_ranges=(0.2, 0.2), ratio="Token", weights=None, aggregation="TokenMean")
kl = partial(_kl, aggregation="TokenMean")

LOSSES: dict[str, Loss] = {
    "policy": lambda x, y, z, m, n=NUM_TOKENS: ppo(x, y, z, m, n).loss,
    "policy, mean of means": lambda x, y, z, m, n=NUM_TOKENS: ppo(x, y, z, m, n, aggregation="SequenceMean").loss,
    "policy, ratio of the sequence": lambda x, y, z, m, n=NUM_TOKENS: ppo(x, y, z, m, n, ratio="Sequence").loss,
    "policy, weighted": lambda x, y, z, m, n=NUM_TOKENS: ppo(x, y, z, m, n, weights=y.abs()).loss,
    "value, clipped": lambda x, y, z, m, n=NUM_TOKENS: value_loss(x, y, z, m, clip_eps=0.2, num_tokens=n),
    "value": lambda x, y, z, m, n=NUM_TOKENS: value_loss(x, y, z, m, clip_eps=None, num_tokens=n),
    "K1": lambda x, y, z, m, n=NUM_TOKENS: kl(x, y, m, n, estimator="K1"),
    "K2": lambda x, y, z, m, n=NUM_TOKENS: kl(x, y, m, n, estimator="K2"),
    "K3": lambda x, y, z, m, n=NUM_TOKENS: kl(x, y, m, n, estimator="K3"),
    "sft": lambda x, y, z, m, n=NUM_TOKENS: sft_loss(x, m, num_tokens=n),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def random_case() -> Case:
    """trained, other, target, mask [3, 6] in float64; some differences are beyond the clip, some within it."""
    generator = torch.Generator().manual_seed(3)
    trained, noise, target = torch.randn(3, 3, 6, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]], dtype=torch.float64)
    return trained, trained + 0.3 * noise, target, mask


def with_gradient(loss: Loss, case: Case) -> tuple[Tensor, Tensor]:
    trained = case[0].clone().requires_grad_()
    value = loss(trained, *case[1:])
    (gradient,) = torch.autograd.grad(value, trained)
    return value.detach(), gradient


@every_loss
def test_the_gradient_is_that_of_finite_differences(name: str) -> None:
    trained, other, target, mask = random_case()
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, other, target, mask), trained.requires_grad_())


@every_loss
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_under_the_mask_reach_no_gradient(name: str, poison: float) -> None:
    *inputs, mask = random_case()
    clean = with_gradient(LOSSES[name], random_case())
    dirty = [torch.where(mask > 0, x, poison) for x in inputs]
    with torch.autograd.set_detect_anomaly(
        True
    ):  # fails on a NaN in any step of the backward pass, not only at its end
        value, gradient = with_gradient(LOSSES[name], (dirty[0], dirty[1], dirty[2], mask))
    assert_close(value, clean[0], atol=0, rtol=0)
    assert_close(gradient, clean[1], atol=0, rtol=0)
    assert gradient[mask == 0].abs().sum() == 0.0
    assert gradient[mask > 0].abs().sum() > 0.0


@every_loss
def test_padding_adds_nothing(name: str) -> None:
    case = random_case()
    value, gradient = with_gradient(LOSSES[name], case)
    trained, other, target, mask = (torch.cat([x, torch.zeros(3, 4, dtype=torch.float64)], dim=1) for x in case)
    padded_value, padded_gradient = with_gradient(LOSSES[name], (trained, other, target, mask))
    assert_close(padded_value, value)
    assert_close(padded_gradient[:, :6], gradient)


@every_loss
def test_micro_batches_in_any_order_add_up_to_the_whole_batch(name: str) -> None:
    trained, other, target, mask = random_case()
    value, gradient = with_gradient(LOSSES[name], (trained, other, target, mask))
    total, gradients = torch.zeros((), dtype=torch.float64), torch.zeros_like(gradient)
    for rows in (torch.tensor([2]), torch.tensor([1, 0])):
        share, part = with_gradient(LOSSES[name], (trained[rows], other[rows], target[rows], mask[rows]))
        total += share
        gradients[rows] = part
    assert_close(total, value)
    assert_close(gradients, gradient)


@every_loss
def test_an_empty_mask_gives_a_differentiable_zero(name: str) -> None:
    trained, other, target, mask = random_case()
    value, gradient = with_gradient(LOSSES[name], (trained, other, target, torch.zeros_like(mask)))
    assert value.item() == 0.0
    assert gradient.abs().sum() == 0.0


@every_loss
def test_the_normaliser_is_the_argument_whatever_the_mask_holds(name: str) -> None:
    case = random_case()
    once = LOSSES[name](*case, 1).item()
    assert once != 0.0
    assert LOSSES[name](*case, 10).item() == pytest.approx(once / 10)
    assert LOSSES[name](*case, 2.5).item() == pytest.approx(once / 2.5)
    assert LOSSES[name](*case, torch.tensor(40)).item() == pytest.approx(once / 40)


RATIO_CASES = {
    # ratio, advantage: loss of the one token, its gradient by the log-probability, whether the clip cut it off
    "unmoved, good": (1.0, 2.0, -2.0, -2.0, 0.0),
    "unmoved, bad": (1.0, -2.0, 2.0, 2.0, 0.0),
    "within the clip": (1.1, 2.0, -2.2, -2.2, 0.0),
    "good and already likelier: cut off": (1.5, 2.0, -2.4, 0.0, 1.0),
    "bad and already likelier: not cut off": (1.5, -2.0, 3.0, 3.0, 0.0),
    "bad and already rarer: cut off": (0.5, -2.0, 1.6, 0.0, 1.0),
    "good and become rarer: not cut off": (0.5, 2.0, -1.0, -1.0, 0.0),
}


@each_case("case", RATIO_CASES.values(), ids=RATIO_CASES)
def test_ppo_of_one_token_by_hand(case: tuple[float, float, float, float, float]) -> None:
    ratio, advantage, loss, gradient, cut_off = case
    log_probs = torch.tensor([[0.0, math.log(ratio) - 1.0]], requires_grad=True)
    mask = torch.tensor([[0.0, 1.0]])
    found = ppo(log_probs, torch.tensor([[0.0, -1.0]]), torch.full((1, 2), advantage), mask, 1)
    (found_gradient,) = torch.autograd.grad(found.loss, log_probs)
    assert found.loss.item() == pytest.approx(loss, rel=1e-5)
    assert found_gradient[0].tolist() == pytest.approx([0.0, gradient], rel=1e-5)
    assert found.clipped_tokens.item() == cut_off
    assert found.max_ratio_deviation.item() == pytest.approx(abs(ratio - 1.0), abs=1e-6)


def test_ppo_reports_over_the_mask_only_and_without_gradient() -> None:
    log_ratios = torch.tensor([[9.0, math.log(1.5), 0.0, math.log(0.9), math.nan]], requires_grad=True)
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0]])
    found = ppo(log_ratios, torch.zeros(1, 5), torch.ones(1, 5), mask, 6)
    assert found.clipped_tokens.item() == 1.0
    assert found.max_ratio_deviation.item() == pytest.approx(0.5)
    assert found.loss.item() == pytest.approx(-(1.2 + 1.0 + 0.9) / 6)
    assert found.loss.requires_grad
    assert not found.clipped_tokens.requires_grad
    assert not found.max_ratio_deviation.requires_grad


@pytest.mark.parametrize("num_rows", [0, 2])
def test_ppo_without_a_masked_token_reports_no_deviation(num_rows: int) -> None:
    full = torch.full((num_rows, 3), 4.0)
    found = ppo(full, -full, full, torch.zeros(num_rows, 3), 5)
    assert (found.loss.item(), found.clipped_tokens.item(), found.max_ratio_deviation.item()) == (0.0, 0.0, 0.0)


def test_the_first_ppo_update_is_the_policy_gradient() -> None:
    """At ratio 1 the gradient is that of -mean(A log pi), REINFORCE's."""
    log_probs, _, advantages, mask = random_case()
    _, found = with_gradient(LOSSES["policy"], (log_probs, log_probs.clone(), advantages, mask))
    assert_close(found, -advantages * mask / NUM_TOKENS)


def test_the_clip_may_be_wider_above_than_below() -> None:
    """DAPO: at (0.2, 0.5) a good token of ratio 1.4 still counts whole, a bad one of 0.7 is cut off at 0.8."""
    log_ratios = torch.tensor([[math.log(1.4), math.log(1.6), math.log(0.7)]])
    found = ppo(
        log_ratios, torch.zeros(1, 3), torch.tensor([[1.0, 1.0, -1.0]]), torch.ones(1, 3), 1, clip_ranges=(0.2, 0.5)
    )
    assert found.loss.item() == pytest.approx(-(1.4 + 1.5 - 0.8))
    assert found.clipped_tokens.item() == 2.0


def test_a_responses_ratio_is_its_tokens_geometric_mean() -> None:
    """GSPO: ratios 2 and 1/2 make 1, and 1.2 and 1.2^3 make 1.44, which is cut off at 1.2 as a whole."""
    log_ratios = torch.tensor([[math.log(2.0), -math.log(2.0), 9.0], [math.log(1.2), 3 * math.log(1.2), 9.0]])
    log_ratios.requires_grad_()
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    advantages = torch.tensor([[3.0] * 3, [5.0] * 3])
    found = ppo(log_ratios, torch.zeros(2, 3), advantages, mask, 2, ratio="Sequence", aggregation="SequenceMean")
    (gradient,) = torch.autograd.grad(found.loss, log_ratios)
    assert found.loss.item() == pytest.approx(-(3.0 * 1.0 + 5.0 * 1.2) / 2)
    assert gradient.tolist() == [pytest.approx([-0.75, -0.75, 0.0]), [0.0, 0.0, 0.0]]  # 3 * 1 / 2 tokens / 2 responses
    assert found.clipped_tokens.item() == 2.0


def test_weights_multiply_what_a_token_adds() -> None:
    log_ratios, weights = torch.log(torch.tensor([[1.1, 1.5]])), torch.tensor([[0.5, 2.0]])
    found = ppo(log_ratios, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), 1, weights=weights)
    assert found.loss.item() == pytest.approx(-(0.5 * 1.1 + 2.0 * 1.2))


@each_case(
    ("value", "old", "target", "clip_eps", "expected"),
    [
        (3.0, 0.0, 1.0, None, 2.0),  # (3-1)^2 / 2
        (3.0, 0.0, 5.0, 0.5, 10.125),  # clip(V) = 0.5: max(4, 20.25) / 2
        (3.0, 0.0, 1.0, 0.5, 2.0),  # clip(V) = 0.5: max(4, 0.25) / 2
        (-3.0, 0.0, -5.0, 0.5, 10.125),
        (0.3, 0.0, 1.0, 0.5, 0.245),  # within the clip: 0.7^2 / 2
    ],
)
def test_the_value_loss_of_one_token_by_hand(
    value: float, old: float, target: float, clip_eps: float | None, expected: float
) -> None:
    one = torch.ones(1, 1)
    found = value_loss(value * one, old * one, target * one, one, clip_eps=clip_eps, num_tokens=1)
    assert found.item() == pytest.approx(expected)


def test_the_unclipped_value_loss_does_not_read_the_old_values() -> None:
    one = torch.ones(1, 1)
    assert value_loss(3.0 * one, math.nan * one, one, one, clip_eps=None, num_tokens=1).item() == 2.0


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("K1", math.log(2.0) - math.log(4.0)), ("K2", 2.5 * math.log(2.0) ** 2), ("K3", 2.5 - math.log(2.0))],
)
def test_the_kl_loss_by_hand(estimator: Estimator, expected: float) -> None:
    # reference / policy = 1/2 and 4: K1 = log 2 - log 4, K2 = (1 + 4) / 2 (log 2)^2,
    # K3 = (1/2 - 1 + log 2) + (4 - 1 - log 4)
    ref_log_probs = torch.tensor([[7.0, -math.log(2.0), math.log(4.0)]])
    mask = torch.tensor([[0.0, 1.0, 1.0]])
    found = kl(torch.zeros(1, 3), ref_log_probs, mask, 1, estimator=estimator)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_the_sft_loss_is_cross_entropy_over_the_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator)
    tokens = torch.randint(7, (2, 5), generator=generator)
    mask = torch.tensor([[0.0, 0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0, 1.0]])
    labels = torch.where(mask > 0, tokens, -100)
    expected = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    log_probs = logits[:, :-1].log_softmax(2).gather(2, tokens[:, 1:, None])[..., 0]
    assert_close(sft_loss(pad(log_probs, (1, 0)), mask, num_tokens=6), expected)


def test_the_pair_loss_by_hand() -> None:
    # odds 3:1 for the chosen, then even odds of weight 1/2; divided by 4 pairs
    found = pair_loss(
        torch.tensor([math.log(3.0) + 1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.5]), num_pairs=4
    )
    assert found.item() == pytest.approx((-math.log(0.75) + 0.5 * math.log(2.0)) / 4)


def test_the_pair_loss_is_logistic_and_its_shares_add_up() -> None:
    chosen, rejected, weight = torch.rand(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4
    expected = binary_cross_entropy_with_logits(chosen - rejected, torch.ones_like(chosen), weight, reduction="sum") / 8
    assert_close(pair_loss(chosen, rejected, weight, num_pairs=8), expected)
    shares = [pair_loss(chosen[i::3], rejected[i::3], weight[i::3], num_pairs=8) for i in range(3)]
    assert_close(torch.stack(shares).sum(), expected)
    assert torch.autograd.gradcheck(
        lambda c, r: pair_loss(c, r, weight, num_pairs=8), (chosen.requires_grad_(), rejected.requires_grad_())
    )


def test_a_pair_of_weight_zero_reaches_neither_loss_nor_gradient() -> None:
    chosen = torch.tensor([2.0, math.nan], requires_grad=True)
    rejected = torch.tensor([2.0, math.inf], requires_grad=True)
    found = pair_loss(chosen, rejected, torch.tensor([1.0, 0.0]), num_pairs=1)
    by_chosen, by_rejected = torch.autograd.grad(found, (chosen, rejected))
    assert found.item() == pytest.approx(math.log(2.0))
    assert by_chosen.tolist() == [-0.5, 0.0]
    assert by_rejected.tolist() == [0.5, 0.0]


def test_the_pair_loss_stays_finite_for_large_margins() -> None:
    found = pair_loss(torch.tensor([-500.0]), torch.tensor([500.0]), torch.ones(1), num_pairs=1)
    assert found.item() == 1000.0


def test_the_sign_loss_by_hand() -> None:
    # a safe response of cost -log 3 and an unsafe one of cost log 2; the third is padding
    costs = torch.tensor([-math.log(3.0), math.log(2.0), math.nan])
    found = sign_loss(costs, torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 0.0]), num_pairs=2)
    assert found.item() == pytest.approx(-(math.log(3 / 4) + math.log(2 / 3)) / 2)
