"""Importance weights of a generator's responses: plain formulas of each level and mode in float64, row by row."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlhf_api.spec.algorithms import RolloutCorrection
from rlhf_trainer.ops.rollout_correction import correct_rollout, response_quarters, unit_weights
from tests.each import each_case

LEVELS, MODES = ("Token", "Sequence", "Geometric"), ("Truncate", "Clip", "Mask")
OPTIONS = [
    {"level": level, "mode": mode, **bounds, **veto}
    for level, mode, bounds, veto in product(
        LEVELS, MODES, ({}, {"low": 0.7, "high": 1.4}, {"high": 2.5}), ({}, {"veto": 0.3})
    )
    if mode != "Truncate" or "low" not in bounds
]


def random_rows(seed: int) -> tuple[Tensor, Tensor]:
    """Log-ratios and mask [5, 12] in float64: prompts, episodes with gaps, and a row without a response."""
    draws = np.random.default_rng(seed)
    mask = draws.integers(0, 2, (5, 12)).astype(float)
    mask[:, 0], mask[4] = 0.0, 0.0
    return torch.from_numpy(draws.normal(0.0, 0.6, (5, 12))), torch.from_numpy(mask)


def by_hand(log_ratios: Tensor, mask: Tensor, options: dict[str, Any]) -> np.ndarray[Any, Any]:
    level, mode, high = options["level"], options["mode"], options.get("high")
    high = high or (1.001 if level == "Geometric" else 2.0)
    low, veto = options.get("low", 1.0 / high), options.get("veto", 0.0)
    weights = np.zeros(mask.shape)
    for row, chosen in enumerate(mask.numpy() > 0):
        ratios = np.exp(log_ratios[row].numpy()[chosen])
        if not len(ratios) or ratios.min() < veto:
            continue
        product_ = float(np.prod(ratios))
        unit = {"Token": ratios, "Sequence": product_, "Geometric": product_ ** (1.0 / len(ratios))}[level]
        found = unit * np.ones(len(ratios))
        bounded = {
            "Truncate": np.minimum(found, high),
            "Clip": np.clip(found, low, high),
            "Mask": found * ((found >= low) & (found <= high)),
        }
        weights[row, chosen] = bounded[mode]
    return weights


@each_case("options", OPTIONS, ids=lambda each: " ".join(map(str, each.values())))
def test_weights_are_those_of_the_formulas(options: dict[str, Any]) -> None:
    correction = RolloutCorrection.model_validate(options)
    unbounded = correction.model_copy(update={"mode": "Clip", "low": 1e-9, "high": 1e9})
    changed = set()
    for seed in range(20):
        log_ratios, mask = random_rows(seed)
        found = correct_rollout(log_ratios, mask, correction=correction)
        np.testing.assert_allclose(found.weights.numpy(), by_hand(log_ratios, mask, options), rtol=1e-12)
        free = correct_rollout(log_ratios, mask, correction=unbounded)
        assert torch.equal(found.bounded, (found.weights != free.weights) & (free.weights > 0))
        changed |= {bool(found.bounded.any()), bool(found.vetoed.any()) + 2}
    is_reached = options["level"] != "Geometric" or options.get("high") != 2.5
    assert changed >= {is_reached, 3 if "veto" in options else 2}


def test_the_older_name_of_the_upper_bound_stays() -> None:
    assert RolloutCorrection(mode="Mask", cap=4.0).bounds == (0.25, 4.0)
    assert RolloutCorrection(cap=4.0).bounds == RolloutCorrection(high=4.0).bounds == (0.0, 4.0)
    assert RolloutCorrection().bounds == (0.0, 2.0)


def test_weights_have_no_gradient_and_padding_is_not_read() -> None:
    log_ratios, mask = random_rows(0)
    dirty = torch.where(mask > 0, log_ratios, math.nan).requires_grad_()
    for level in LEVELS:
        correction = RolloutCorrection.model_validate({"level": level, "veto": 0.1})
        found = correct_rollout(dirty, mask, correction=correction)
        assert not found.weights.requires_grad
        assert_close(found.weights, correct_rollout(log_ratios, mask, correction=correction).weights)


def test_a_response_counts_once_in_the_mean_of_its_weights() -> None:
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert unit_weights(mask, "Token").sum(1).tolist() == [3.0, 1.0, 0.0]
    assert unit_weights(mask, "Sequence").sum(1).tolist() == [pytest.approx(1.0), 1.0, 0.0]


def test_quarters_divide_the_tokens_of_a_response() -> None:
    mask = torch.tensor([[0.0] + [1.0] * 8, [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 9])
    quarters = response_quarters(mask)
    assert torch.equal(quarters.sum(0), mask)
    assert [quarter[0].nonzero()[:, 0].tolist() for quarter in quarters] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert [quarter[1].nonzero()[:, 0].tolist() for quarter in quarters] == [[0], [2], [4], []]
