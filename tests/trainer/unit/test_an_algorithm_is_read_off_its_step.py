"""What follows from the parameters and the calls of a step, and what an algorithm cannot do without."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import Field

from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.algorithms import Algorithm
from rlhf_trainer.algorithms.models import Actor, Advantage, B, Reward
from tests.each import each_case


@each_case(
    ("name", "data", "trained", "frozen", "offline"),
    [
        ("SFT", "completions", ("actor",), (), True),
        ("RewardModel", "pairs", ("reward",), (), True),
        ("CostModel", "safety_pairs", ("cost",), (), True),
        ("DPO", "pairs", ("actor",), ("reference",), True),
        ("KTO", "labelled_completions", ("actor",), ("reference",), True),
        ("OnlineDPO", "prompts", ("actor",), ("reference", "reward"), False),
        ("PPO", "prompts", ("actor", "critic"), ("reference", "reward"), False),
        ("SafeRLHF", "prompts", ("actor", "critic"), ("reference", "reward", "cost"), False),
        ("RLOO", "prompts", ("actor",), ("reference", "reward"), False),
    ],
)
def test_data_and_roles(name: str, data: str, trained: tuple[str, ...], frozen: tuple[str, ...], offline: bool) -> None:
    found = ALGORITHMS[name]
    assert (found.data, found.trained, found.frozen, found.offline) == (data, trained, frozen, offline)


def test_only_online_dpo_chooses_pairs() -> None:
    assert [name for name, each in ALGORITHMS.items() if each.chooses_pairs] == ["OnlineDPO"]


def test_calls_stand_in_their_order_left_out_ones_too() -> None:
    calls = [".".join(call) for call in ALGORITHMS["SafeRLHF"].calls]
    assert calls[:4] == [
        "actor.generate_sequences",
        "actor.compute_log_prob",
        "critic.compute_values",
        "cost_critic.compute_values",
    ]
    assert ALGORITHMS["ReMax"].calls.count(("actor", "generate_sequences")) == 2


def test_an_algorithm_without_a_paper_and_a_step_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^the algorithm Empty has no paper and no step$"):

        class Empty(Algorithm):
            name: Annotated[Literal["Empty"], Field(description="Nothing.")]


def test_a_step_that_asks_for_an_advantage_has_one() -> None:
    with pytest.raises(TypeError, match=r"^the step of Bare asks for an advantage, and it has none$"):

        class Bare(Algorithm):
            paper = "arXiv:2600.00001"
            name: Annotated[Literal["Bare"], Field(description="A step alone.")]

            @staticmethod
            def step(prompts: B, *, actor: Actor[B], reward: Reward[B], advantage: Advantage[B]) -> None:
                batch = reward.compute_reward(actor.generate_sequences(prompts))
                actor.update_actor(advantage.compute_advantage(batch))
