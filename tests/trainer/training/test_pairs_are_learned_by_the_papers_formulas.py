"""Losses of preference pairs (DPO and its kin, SimPO, ORPO): plain numpy formulas of sums and lengths, in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.algorithms import Preference
from tests.api.cases import made
from tests.each import each_case

Array = np.ndarray[Any, Any]
Formula = Callable[[Array, Array, Array, Array], Array]
"""Loss [N] of the log-ratios (chosen, rejected) and of the numbers of tokens (chosen, rejected)."""
BETA, WRONG = 0.3, 0.2


def log_sigmoid(x: Array) -> Array:
    found: Array = -np.logaddexp(0.0, -x)
    return found


def smoothed(margin: Array, sign: float) -> Array:
    found: Array = -(1 - WRONG) * log_sigmoid(margin) - sign * WRONG * log_sigmoid(-margin)
    return found


def log_odds(mean: Array) -> Array:
    found: Array = mean - np.log1p(-np.exp(mean))
    return found


LOSSES: dict[str, tuple[dict[str, Any], Formula]] = {
    "DPO": ({"name": "DPO"}, lambda c, r, _, __: -log_sigmoid(BETA * (c - r))),
    "cDPO": ({"name": "DPO", "labelSmoothing": WRONG}, lambda c, r, _, __: smoothed(BETA * (c - r), 1.0)),
    "robust DPO": (
        {"name": "DPO", "loss": "Robust", "labelSmoothing": WRONG},
        lambda c, r, _, __: smoothed(BETA * (c - r), -1.0) / (1 - 2 * WRONG),
    ),
    "IPO": ({"name": "DPO", "loss": "IPO"}, lambda c, r, _, __: (c - r - 1 / (2 * BETA)) ** 2),
    "IPO by mean": (
        {"name": "DPO", "loss": "IPO", "lengthNormalized": True},
        lambda c, r, m, n: (c / m - r / n - 1 / (2 * BETA)) ** 2,
    ),
    "DPO by mean": (
        {"name": "DPO", "lengthNormalized": True},
        lambda c, r, m, n: -log_sigmoid(BETA * (c / m - r / n)),
    ),
    "online, robust": (
        {"name": "OnlineDPO", "loss": "Robust", "labelSmoothing": WRONG},
        lambda c, r, _, __: smoothed(BETA * (c - r), -1.0) / (1 - 2 * WRONG),
    ),
    "SimPO": (
        {"name": "SimPO", "margin": 0.7},
        lambda c, r, m, n: -log_sigmoid(BETA * (c / m - r / n) - 0.7),
    ),
    "ORPO": (
        {"name": "ORPO"},
        lambda c, r, m, n: -c / m - BETA * log_sigmoid(log_odds(c / m) - log_odds(r / n)),
    ),
}


@each_case("name", LOSSES)
def test_a_pairs_loss_is_its_papers_formula(name: str) -> None:
    options, formula = LOSSES[name]
    algorithm = ALGORITHMS[options["name"]].model_validate({**options, "beta": BETA})
    assert isinstance(algorithm, Preference)
    draws = np.random.default_rng(0)
    tokens = draws.integers(1, 40, (2, 500)).astype(float)
    sums = -draws.exponential(1.0, (2, 500)) * tokens  # log-probabilities are below 0, and log-ratios may be
    chosen, rejected = (
        algorithm.implicit_rewards(torch.from_numpy(total), torch.from_numpy(count))
        for total, count in zip(sums, tokens, strict=True)
    )
    found = algorithm.losses(chosen, rejected, logsigmoid).numpy()
    np.testing.assert_allclose(found, formula(*sums, *tokens), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["SimPO", "ORPO"])
def test_where_no_reference_is_needed_none_is_loaded(name: str) -> None:
    job = Job.parse(made(name, ()))
    assert list(job.models()) == ["actor"]
    with pytest.raises(SpecError, match=f"{name} has no reference"):
        Job.parse(made(name, ("models.reference={uri: hf://x}",)))


def test_a_certain_response_has_finite_odds() -> None:
    algorithm = ALGORITHMS["ORPO"].model_validate({"name": "ORPO"})
    assert isinstance(algorithm, Preference)
    certain = torch.zeros(1, requires_grad=True)
    loss = algorithm.losses(algorithm.implicit_rewards(certain, torch.ones(1)), torch.tensor([-2.0]), logsigmoid)
    (gradient,) = torch.autograd.grad(loss.sum(), certain)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient).all()
