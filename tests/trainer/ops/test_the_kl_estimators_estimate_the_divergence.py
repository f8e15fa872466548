"""K1, K2 and K3 against the exact divergence, by enumeration and by sampling; the steering scalar by hand."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from torch.testing import assert_close

from rlhf_api.spec.algorithms import KL, Estimator
from rlhf_trainer.ops.kl import KLController, RateController, kl_estimate

POLICY = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.3, 0.1, 0.4], dtype=torch.float64)
EXACT = kl_divergence(Categorical(probs=POLICY), Categorical(probs=REFERENCE))
ALL: tuple[Estimator, ...] = ("K1", "K2", "K3")


def expectation(estimator: Estimator, policy: Tensor, reference: Tensor) -> Tensor:
    return (policy * kl_estimate(policy.log(), reference.log(), estimator=estimator)).sum()


def test_values_by_hand() -> None:
    log_probs, ref_log_probs = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    found = {name: kl_estimate(log_probs, ref_log_probs, estimator=name).item() for name in ALL}
    # reference / policy = 1/2: K1 = log 2, K2 = (log 2)^2 / 2, K3 = 1/2 - 1 + log 2
    two = math.log(2.0)
    assert found == pytest.approx({"K1": two, "K2": two**2 / 2, "K3": two - 0.5}, rel=1e-6)


@pytest.mark.parametrize("estimator", ["K1", "K3"])
def test_k1_and_k3_are_unbiased_by_enumeration(estimator: Estimator) -> None:
    assert_close(expectation(estimator, POLICY, REFERENCE), EXACT)


@pytest.mark.parametrize("estimator", ["K1", "K3"])
def test_k1_and_k3_are_unbiased_by_sampling(estimator: Estimator) -> None:
    num_samples = 200_000
    drawn = torch.multinomial(POLICY, num_samples, replacement=True, generator=torch.Generator().manual_seed(0))
    samples = kl_estimate(POLICY.log()[drawn], REFERENCE.log()[drawn], estimator=estimator)
    standard_error = samples.std() / math.sqrt(num_samples)
    assert standard_error < 0.01 * EXACT
    assert abs(samples.mean() - EXACT) < 4.0 * standard_error


def test_k2_is_biased_far_away_and_right_to_third_order_nearby() -> None:
    assert abs(expectation("K2", POLICY, REFERENCE) - EXACT) > 0.1 * EXACT
    tilt = torch.tensor([1.0, -1.0, 2.0, 0.5], dtype=torch.float64)
    gaps = []
    for size in (0.1, 0.05):
        near = (POLICY.log() + size * tilt).softmax(dim=0)
        exact = kl_divergence(Categorical(probs=POLICY), Categorical(probs=near))
        gaps.append((expectation("K2", POLICY, near) - exact).abs())
    assert (gaps[0] / gaps[1]).item() == pytest.approx(8.0, rel=0.2)


def test_k2_and_k3_are_never_negative_and_k1_changes_sign() -> None:
    log_probs, ref_log_probs = -5.0 * torch.rand(2, 1000, generator=torch.Generator().manual_seed(0))
    assert kl_estimate(log_probs, ref_log_probs, estimator="K2").min() >= 0.0
    assert kl_estimate(log_probs, ref_log_probs, estimator="K3").min() >= 0.0
    assert_close(
        kl_estimate(log_probs, ref_log_probs, estimator="K1"), -kl_estimate(ref_log_probs, log_probs, estimator="K1")
    )
    assert kl_estimate(log_probs, ref_log_probs, estimator="K1").min() < 0.0


@pytest.mark.parametrize("estimator", ALL)
def test_equal_policies_are_at_distance_zero(estimator: Estimator) -> None:
    assert kl_estimate(POLICY.log(), POLICY.log(), estimator=estimator).tolist() == [0.0] * 4


def test_k3_keeps_its_digits_for_policies_that_hardly_differ() -> None:
    # x = 1e-3: e^-x - 1 + x = x^2/2 - x^3/6 + ...; exp(x) - 1 in float32 would be wrong by several percent
    found = kl_estimate(torch.tensor([1e-3]), torch.tensor([0.0]), estimator="K3").item()
    assert found == pytest.approx(1e-6 / 2 - 1e-9 / 6, rel=1e-3)


def test_only_k2_as_a_loss_has_the_gradient_of_the_divergence() -> None:
    logits = POLICY.log().clone().requires_grad_()
    exact = kl_divergence(Categorical(logits=logits), Categorical(probs=REFERENCE))
    (wanted,) = torch.autograd.grad(exact, logits)
    for estimator in ALL:
        log_probs = logits.log_softmax(dim=0)
        # sampled tokens weight the estimate, their drawing has no gradient
        expected = (POLICY * kl_estimate(log_probs, REFERENCE.log(), estimator=estimator)).sum()
        (gradient,) = torch.autograd.grad(expected, logits)
        assert torch.allclose(gradient, wanted) is (estimator == "K2"), estimator


def test_the_steering_scalar_by_hand() -> None:
    """On the target; 10 % above and below; far above and far below, which are clipped; and a KL that is not finite."""
    moves = {6.0: 0.0, 6.6: 0.1, 5.4: -0.1, 60.0: 0.2, 0.0: -0.2, math.nan: 0.0}
    for kl, error in moves.items():
        controller = KLController(KL(controller="Coefficient", target=6.0), 0.1)
        controller.follow(256 * kl, 256.0)
        assert controller.value == pytest.approx(0.1 * (1 + error * 256 / 10_000), rel=1e-12), kl


def test_the_factor_of_the_learning_rate_by_hand() -> None:
    """The logarithm adds up the errors, of which one is bounded; more responses than the horizon count as it."""
    factor = RateController(KL(controller="LearningRate", target=6.0, horizon=1024))
    for kl, logarithm in {6.0: 0.0, 12.0: -0.25, 0.0: 0.0, 30.0: -1.0, math.nan: -1.0, 9.0: -1.125}.items():
        factor.follow(256 * kl, 256.0)
        assert math.log(factor.value) == pytest.approx(logarithm, abs=1e-12), kl
    factor.follow(1024 * 6e9, 1024.0)
    assert factor.value == 0.1
    for _ in range(9):
        factor.follow(0.0, 4096.0)
    assert factor.value == 10.0


def test_the_mean_of_skewed_updates_reaches_the_target() -> None:
    """KLs of updates are log-normal, and grow with the square of the learning rate from twice the target."""
    draws = np.random.default_rng(0)
    factor, found = RateController(KL(controller="LearningRate", target=0.02, horizon=5120)), []
    for _ in range(2000):
        found.append(0.04 * factor.value**2 * draws.lognormal(-(0.95**2) / 2, 0.95))
        factor.follow(512 * found[-1], 512.0)
    assert np.mean(found[100:]) == pytest.approx(0.02, rel=0.03)
    assert np.median(found[100:]) < 0.02 * 0.8
