"""Protocols of the models that a step calls; `B` is a batch, of Ray object references or (torchrun) of tensors.

A step's parameter has the model's role as its name; the parameter's type, a protocol, selects the worker class
(`run/worker_specs.py`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, TypeVar

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor
else:
    Tensor = Any  # the files of the algorithms import without torch

Whiten: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Function (values, mask) [B, T] -> the values with mean 0 and variance 1 over the tokens of all ranks."""

LogSigmoid: TypeAlias = Callable[[Tensor], Tensor]
"""Function x -> log sigmoid(x), by element, without overflow."""


class Rows(Protocol):
    """Batch with the operations that the step of an algorithm may use."""

    def with_prefixed(self, **others: Self) -> Self: ...


B = TypeVar("B", bound=Rows)
B_contra = TypeVar("B_contra", contravariant=True)


class Actor(Protocol[B]):
    """Policy in training: generates responses (tokens, response_mask, old_log_probs [B, T]), learns from advantages."""

    def generate_sequences(self, batch: B, *, do_sample: bool = True) -> B: ...
    def compute_log_prob(self, batch: B) -> B: ...
    def compute_loss(self, batch: B) -> Any: ...
    def update_actor(self, batch: B) -> Any: ...


class Generator(Protocol[B]):
    """A language model that generates responses and is not trained."""

    def generate_sequences(self, batch: B, *, do_sample: bool = True) -> B: ...


class OnlinePreferenceActor(Protocol[B]):
    """An actor that learns from preference pairs of its own responses."""

    def generate_sequences(self, batch: B, *, do_sample: bool = True) -> B: ...
    def update_actor(self, batch: B) -> Any: ...


class Critic(Protocol[B]):
    """Critic model: adds values [B, T] of the tokens to a batch, and learns from token_rewards [B, T]."""

    def compute_values(self, batch: B) -> B: ...
    def update_critic(self, batch: B) -> B: ...


class CostCritic(Critic[B], Protocol[B]):
    """Critic that predicts the remaining cost of a response, not the reward (Safe RLHF)."""


class Reference(Protocol[B]):
    """Reference model, the actor before training: adds ref_log_probs [B, T], or KTO's ref_mismatched [B]."""

    def compute_log_prob(self, batch: B) -> B: ...
    def compute_mismatched_log_prob(self, batch: B) -> B: ...


class Teacher(Protocol[B]):
    """Frozen model with the actor's vocabulary: adds its log-probabilities of tokens to a batch (`TeacherWorker`)."""

    def compute_log_prob(self, batch: B) -> B: ...


class PairReference(Protocol[B]):
    """Reference model, the actor before training: adds log-probabilities of pairs, ref_chosen and ref_rejected [B]."""

    def compute_pair_log_prob(self, batch: B) -> B: ...


class Pairs(Protocol[B]):
    """Choice of one preference pair among the responses to each prompt."""

    def choose_pairs(self, batch: B) -> B: ...


class Reward(Protocol[B]):
    """Reward source: adds responses' scores [B] to a batch, by a model, a function, a service, a judge or their sum."""

    def compute_reward(self, batch: B) -> B: ...


class Cost(Protocol[B]):
    """Cost model: adds costs [B] of responses to a batch; a response with a cost above 0 is unsafe."""

    def compute_cost(self, batch: B) -> B: ...


class Merger(Protocol[B_contra]):
    """Writer of one model merged from several: writes the files of the layers in a batch's field `layer` [B]."""

    def merge(self, batch: B_contra) -> Any: ...


class Responses(Protocol[B_contra]):
    """Writer of the responses that a job generates as a data set."""

    def write(self, batch: B_contra) -> Any: ...


class Advantage(Protocol[B]):
    """Advantage estimator: adds advantages [B, T] to a batch by the algorithm's method `advantage`."""

    def compute_advantage(self, batch: B) -> B: ...


class CriticsAdvantage(Advantage[B], Protocol[B]):
    """Advantage estimator of algorithms with a critic: also adds token_rewards [B, T], from which critics learn."""

    def compute_rewards(self, batch: B) -> B: ...


class SupervisedActor(Protocol[B_contra]):
    """An actor that learns from given responses to prompts, by supervised fine-tuning."""

    def update_actor(self, batch: B_contra) -> Any: ...


class PreferenceActor(Protocol[B_contra]):
    """An actor that learns from given pairs of a chosen and a rejected response."""

    def update_actor(self, batch: B_contra) -> Any: ...


class LabelledActor(Protocol[B]):
    """An actor that learns from responses with a label; it also adds reference_point [B], KTO's z0, to a batch."""

    def compute_reference_point(self, batch: B) -> B: ...
    def update_actor(self, batch: B) -> Any: ...


class RewardInTraining(Protocol[B_contra]):
    """A reward model that learns from pairs of a chosen and a rejected response."""

    def update_reward(self, batch: B_contra) -> Any: ...


class CostInTraining(Protocol[B_contra]):
    """A cost model that learns from pairs of responses and from each response's label, safe or unsafe."""

    def update_cost(self, batch: B_contra) -> Any: ...


def sample_and_learn(
    prompts: B, *, actor: Actor[B], reference: Reference[B], reward: Reward[B], advantage: Advantage[B]
) -> None:
    """Run one iteration of an algorithm without a critic, like GRPO; prompts: a row for each response to generate."""
    batch = actor.generate_sequences(prompts)
    batch = actor.compute_log_prob(batch)
    batch = reference.compute_log_prob(batch)
    batch = reward.compute_reward(batch)
    batch = advantage.compute_advantage(batch)
    actor.update_actor(batch)
