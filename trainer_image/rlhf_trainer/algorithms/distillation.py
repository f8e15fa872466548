"""Distillation of a teacher into the actor, on-policy (GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543).

The actor pi writes responses y, and a teacher p gives the probability of each token. Sampled: the advantage of a token
is log p(y_t | x, y_<t) - log pi(y_t | x, y_<t), whose mean is -KL(pi || p) (MiniLLM, equation 2, of single steps). Any
other divergence is GKD's loss D(p || pi) at each position of y (equation 4), with its gradient over the vocabulary.
"""

from math import log
from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.algorithms import Distilling, NoKL
from rlhf_trainer.algorithms.grpo import compare_in_groups
from rlhf_trainer.algorithms.models import Actor, Advantage, B, Reference, Reward, Teacher, Tensor


class Distillation(Distilling):
    paper, may_lack_reward = "arXiv:2306.13649", True
    name: Literal["Distillation"]
    """The actor learns a teacher's probabilities of the tokens of its own responses."""
    teacher_share: float | None = Field(None, gt=0, lt=1)
    """Share of the teacher in the mixture of JensenShannon (beta of GKD); unset is 0.5."""
    kl: Annotated[NoKL, Field(description="The penalty that keeps the actor near the reference.")] = NoKL()

    @staticmethod
    def step(
        prompts: B,
        *,
        actor: Actor[B],
        teacher: Teacher[B],
        reference: Reference[B],
        reward: Reward[B],
        advantage: Advantage[B],
    ) -> None:
        """Run one iteration; prompts: a row for each response to generate. A job may have no reward."""
        batch = actor.generate_sequences(prompts)
        batch = actor.compute_log_prob(batch)
        batch = teacher.compute_log_prob(batch)
        batch = reference.compute_log_prob(batch)
        batch = reward.compute_reward(batch)
        batch = advantage.compute_advantage(batch)
        actor.update_actor(batch)

    def advantage(
        self,
        returns: Tensor,
        mask: Tensor,
        *,
        rows: slice,
        group_size: int,
        teacher_log_probs: Tensor | None = None,
        old_log_probs: Tensor | None = None,
    ) -> Tensor:
        """Return the advantages [B, T]: GRPO's from the rewards, plus the teacher's if the divergence is Sampled."""
        advantages = compare_in_groups(returns, group_size)[rows, None].nan_to_num(0.0).to(mask.dtype).expand_as(mask)
        if teacher_log_probs is None or old_log_probs is None:
            return advantages
        return advantages + self.divergence_coefficient * (teacher_log_probs - old_log_probs)

    def compare(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return D(p || pi) of each token, [n], from log-probabilities of the same tokens, [n, K] (GKD, section 2)."""
        if self.divergence == "Forward":
            return _kl(teacher, student)
        if self.divergence == "Reverse":
            return _kl(student, teacher)
        share = self.teacher_share or 0.5
        mixture = (teacher + log(share)).logaddexp(student + log(1.0 - share))
        return share * _kl(teacher, mixture) + (1.0 - share) * _kl(student, mixture)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum(dim=-1)
