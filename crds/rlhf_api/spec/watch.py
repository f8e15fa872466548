"""Reactions to problems of a run that raise no error."""

from collections.abc import Sequence
from typing import Literal

from rlhf_api.contract import Spec
from rlhf_api.problems import Problem, SpecError


class Watch(Spec):
    """Reactions to problems that raise no error."""

    no_signal: Literal["Off", "Warn", "Fail"] = "Warn"
    """Reaction to 3 steps in a row without anything to learn. All responses are cut off or get the same reward, no
    group of responses differs in reward, or every gradient is 0.
    """
    changed_code: Literal["Off", "Warn", "Fail"] = "Warn"
    """Reaction to code of your own, a tokenizer or a template that is not what it was at the job's checkpoint."""


def react(reaction: str, path: str, sentences: Sequence[str]) -> Sequence[str]:
    """Return the sentences to warn of, none if the reaction of `watch` is Off; SpecError with all if it is Fail."""
    if sentences and reaction == "Fail":
        raise SpecError(Problem(path, sentence) for sentence in sentences)
    return sentences if reaction == "Warn" else ()
