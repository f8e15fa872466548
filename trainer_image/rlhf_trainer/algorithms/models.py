"""Protocols of the models in a step; `B` is a batch, of references (controller) or of tensors (torchrun).

The name of a step's parameter is the model's role, and its protocol selects the worker (`run/worker_specs.py`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, TypeVar

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor
else:
    Tensor = Any  # the files of the algorithms import without torch

Whiten: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Values and mask [B, T] -> the values with mean 0 and variance 1 over the tokens of all ranks."""


class Rows(Protocol):
    """Operations of an algorithm on a batch."""

    def with_prefixed(self, **others: Self) -> Self: ...


B = TypeVar("B", bound=Rows)
B_contra = TypeVar("B_contra", contravariant=True)


class Actor(Protocol[B]):
    """The policy: adds tokens, response_mask and old_log_probs [B, T] of its responses; learns from advantages."""

    def generate_sequences(self, batch: B, *, do_sample: bool = True) -> B: ...
    def compute_log_prob(self, batch: B) -> B: ...
    def compute_loss(self, batch: B) -> Any: ...
    def update_actor(self, batch: B) -> Any: ...


class Generator(Protocol[B]):
    """A model that is not trained."""

    def generate_sequences(self, batch: B, *, do_sample: bool = True) -> B: ...


class OnlinePreferenceActor(Protocol[B]):
    """An actor that learns from pairs of its own responses."""

    def generate_sequences(self, batch: B, *, do_sample: bool = True) -> B: ...
    def update_actor(self, batch: B) -> Any: ...


class Critic(Protocol[B]):
    """Adds values [B, T] of the tokens, and learns from token_rewards [B, T]."""

    def compute_values(self, batch: B) -> B: ...
    def update_critic(self, batch: B) -> B: ...


class CostCritic(Critic[B], Protocol[B]):
    """Critic that values the remaining cost."""


class Reference(Protocol[B]):
    """The actor before training: adds ref_log_probs [B, T]."""

    def compute_log_prob(self, batch: B) -> B: ...


class PairReference(Protocol[B]):
    """The actor before training: adds ref_chosen and ref_rejected [B]."""

    def compute_pair_log_prob(self, batch: B) -> B: ...


class Pairs(Protocol[B]):
    """Makes a pair of the responses to each prompt."""

    def choose_pairs(self, batch: B) -> B: ...


class Reward(Protocol[B]):
    """Adds scores [B] of the responses: a model, a function, a service, a judge or a sum of them."""

    def compute_reward(self, batch: B) -> B: ...


class Cost(Protocol[B]):
    """Adds costs [B] of the responses; above 0 is unsafe."""

    def compute_cost(self, batch: B) -> B: ...


class Responses(Protocol[B_contra]):
    """Writer of the data set that a job makes."""

    def write(self, batch: B_contra) -> Any: ...


class Advantage(Protocol[B]):
    """Adds advantages [B, T], by the method `advantage` of the algorithm."""

    def compute_advantage(self, batch: B) -> B: ...


class CriticsAdvantage(Advantage[B], Protocol[B]):
    """Advantage of algorithms with a critic: also adds token_rewards [B, T], from which critics learn."""

    def compute_rewards(self, batch: B) -> B: ...


class SupervisedActor(Protocol[B_contra]):
    """An actor that learns from written responses."""

    def update_actor(self, batch: B_contra) -> Any: ...


class PreferenceActor(Protocol[B_contra]):
    """An actor that learns from pairs of responses."""

    def update_actor(self, batch: B_contra) -> Any: ...


class RewardInTraining(Protocol[B_contra]):
    """A reward model that learns from pairs."""

    def update_reward(self, batch: B_contra) -> Any: ...


class CostInTraining(Protocol[B_contra]):
    """A cost model that learns from pairs and from which of them are safe."""

    def update_cost(self, batch: B_contra) -> Any: ...


def sample_and_learn(
    prompts: B, *, actor: Actor[B], reference: Reference[B], reward: Reward[B], advantage: Advantage[B]
) -> None:
    """One iteration without a critic, the step of several algorithms; a prompt has as many rows as responses."""
    batch = actor.generate_sequences(prompts)
    batch = actor.compute_log_prob(batch)
    batch = reference.compute_log_prob(batch)
    batch = reward.compute_reward(batch)
    batch = advantage.compute_advantage(batch)
    actor.update_actor(batch)
