"""Reactions to problems of a run that raise no error."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from rlhf_api.contract import Spec
from rlhf_api.problems import Problem, SpecError


class MismatchGate(Spec):
    """Reaction to a generator whose probabilities are too far from the trainer's."""

    kl: float = Field(0.02, gt=0, description="Largest KL per token between generator and trainer, `kl/rollout`.")
    action: Literal["Warn", "SkipUpdate", "Fail"] = "Warn"
    """SkipUpdate: the step makes no update of the actor. Fail: nor does it, and the job fails at the step's end."""

    @property
    def stops_update(self) -> bool:
        """Whether the divergence must be known before the update."""
        return self.action != "Warn"


class Watch(Spec):
    """Reactions to problems that raise no error."""

    no_signal: Literal["Off", "Warn", "Fail"] = "Warn"
    """Reaction to 3 steps in a row without anything to learn. All responses are cut off or get the same reward, no
    group of responses differs in reward, or every gradient is 0.
    """
    changed_code: Literal["Off", "Warn", "Fail"] = "Warn"
    """Reaction to code of your own, a tokenizer or a template that is not what it was at the job's checkpoint."""

    causes: Literal["Off", "Warn", "Pause", "Fail"] = "Warn"
    """Reaction to a cause that `rlhf why` would find. Pause: the job saves a checkpoint and is suspended."""
    mismatch: MismatchGate | None = None
    """Bound of the KL between generator and trainer; unset: none."""


def react(reaction: str, path: str, sentences: Sequence[str]) -> Sequence[str]:
    """Return the sentences to warn of, none if the reaction of `watch` is Off; SpecError with all if it is Fail."""
    if sentences and reaction == "Fail":
        raise SpecError(Problem(path, sentence) for sentence in sentences)
    return () if reaction == "Off" else sentences
