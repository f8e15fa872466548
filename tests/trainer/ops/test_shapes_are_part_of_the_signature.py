"""A tensor of a wrong shape is refused once the signatures are checked; inputs are never written to."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

from rlhf_api.spec.algorithms import RolloutCorrection
from rlhf_trainer.ops import advantages, aggregation, kl, losses, masks, rollout_correction
from tests.each import each_case

X = torch.rand(2, 3)
ROW = torch.rand(2)
TOKENS = torch.zeros(2, 3, dtype=torch.int64)
Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...], dict[str, Any]]

CASES: dict[str, Case] = {
    "keep": (masks.keep, (X, X), {}),
    "masked_sum": (masks.masked_sum, (X, X), {}),
    "whiten": (masks.whiten, (X, X), {"mean": 0.0, "std": 1.0}),
    "last_token": (masks.last_token, (X,), {}),
    "row_sums": (masks.row_sums, (X, X), {}),
    "shift_values": (advantages.shift_values, (X,), {}),
    "kl_estimate": (kl.kl_estimate, (X, X), {"estimator": "K1"}),
    "gae": (advantages.gae, (X, X, X), {"gamma": 1.0, "lam": 1.0}),
    "token_rewards": (advantages.token_rewards, (ROW, X, X), {"kl_coef": 0.1}),
    "shape_scores": (
        advantages.shape_scores,
        (ROW, ROW),
        {"mean": 0.0, "std": 1.0, "clip": None, "missing_end_penalty": 0.0},
    ),
    "policy_loss": (
        losses.policy_loss,
        (X, X, X, X),
        {"clip_ranges": (0.2, 0.2), "ratio": "Token", "weights": None, "aggregation": "TokenMean", "normalizer": 1},
    ),
    "correct_rollout": (
        rollout_correction.correct_rollout,
        (X, X),
        {"correction": RolloutCorrection(level="Sequence", mode="Mask", veto=0.1)},
    ),
    "response_quarters": (rollout_correction.response_quarters, (X,), {}),
    "aggregate": (aggregation.aggregate, (X, X), {"aggregation": "SequenceMean", "normalizer": 1}),
    "weight_of": (aggregation.weight_of, (X,), {"aggregation": "FixedLength", "max_tokens": 3}),
    "has_signal": (advantages.has_signal, (ROW, ROW > 0), {"group_size": 2}),
    "rewards_to_go": (advantages.rewards_to_go, (X, X), {}),
    "on_every_token": (advantages.on_every_token, (ROW, X), {}),
    "overlong_penalty": (
        advantages.overlong_penalty,
        (ROW,),
        {"max_tokens": 4, "buffer_tokens": 2, "coefficient": 1.0},
    ),
    "value_loss": (losses.value_loss, (X, X, X, X), {"clip_eps": 0.2, "num_tokens": 1}),
    "kl_loss": (losses.kl_loss, (X, X, X), {"estimator": "K1", "aggregation": "TokenMean", "normalizer": 1}),
    "sft_loss": (losses.sft_loss, (X, X), {"num_tokens": 1}),
    "sign_loss": (losses.sign_loss, (ROW, ROW, ROW), {"num_pairs": 1}),
    "pair_loss": (losses.pair_loss, (ROW, ROW, ROW), {"num_pairs": 1}),
}
every_function = pytest.mark.parametrize("name", CASES)


@every_function
def test_right_shapes_are_accepted_and_wrong_ones_refused(name: str) -> None:
    function, tensors, scalars = CASES[name]
    checked = jaxtyped(typechecker=beartype)(function)
    checked(*tensors, **scalars)
    with pytest.raises(TypeCheckError):
        checked(*tensors[:-1], tensors[-1][None], **scalars)


@every_function
def test_inputs_are_not_written_to(name: str) -> None:
    function, tensors, scalars = CASES[name]
    before = [x.clone() for x in tensors]
    function(*tensors, **scalars)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


@each_case("name", [name for name, case in CASES.items() if case[2]])
def test_scalars_go_by_name(name: str) -> None:
    function, tensors, scalars = CASES[name]
    with pytest.raises(TypeError):
        function(*tensors, *scalars.values())


def test_a_mask_of_too_few_rows_is_refused() -> None:
    checked = jaxtyped(typechecker=beartype)(losses.sft_loss)
    with pytest.raises(TypeCheckError):
        checked(X, X[:1], num_tokens=1)
