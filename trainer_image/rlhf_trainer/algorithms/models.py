"""What an algorithm may ask of each model; `B` is a batch, of references (controller) or of tensors (torchrun)."""

from __future__ import annotations

from typing import Any, Protocol, Self, TypeVar


class Rows(Protocol):
    """What an algorithm may do with a batch."""

    def with_prefixed(self, **others: Self) -> Self: ...


B = TypeVar("B", bound=Rows)
B_contra = TypeVar("B_contra", contravariant=True)


class Actor(Protocol[B]):
    def generate_sequences(self, batch: B, *, do_sample: bool = True) -> B: ...
    def compute_log_prob(self, batch: B) -> B: ...
    def compute_loss(self, batch: B) -> Any: ...
    def update_actor(self, batch: B) -> Any: ...


class Critic(Protocol[B]):
    def compute_values(self, batch: B) -> B: ...
    def update_critic(self, batch: B) -> Any: ...


class Reference(Protocol[B]):
    def compute_log_prob(self, batch: B) -> B: ...


class PairReference(Protocol[B]):
    def compute_pair_log_prob(self, batch: B) -> B: ...


class Pairs(Protocol[B]):
    def choose_pairs(self, batch: B) -> B: ...


class Reward(Protocol[B]):
    def compute_reward(self, batch: B) -> B: ...


class Cost(Protocol[B]):
    def compute_cost(self, batch: B) -> B: ...


class Advantage(Protocol[B]):
    def compute_advantage(self, batch: B) -> B: ...


class SupervisedActor(Protocol[B_contra]):
    def update_actor(self, batch: B_contra) -> Any: ...


class RewardInTraining(Protocol[B_contra]):
    def update_reward(self, batch: B_contra) -> Any: ...


class CostInTraining(Protocol[B_contra]):
    def update_cost(self, batch: B_contra) -> Any: ...
