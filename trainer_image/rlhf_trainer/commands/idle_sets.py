"""Arguments of `--set` that change nothing of what a command says."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from rlhf_api.problems import SpecError
from rlhf_planning.command_line import print_errors
from rlhf_trainer.errors import TrainerError


def print_idle_sets(sets: Sequence[str] | None, answer_of: Callable[[Sequence[str]], object]) -> None:
    """Print to stderr each of the arguments of `--set` without which the answer is the same."""
    whole = answer_of(sets) if sets else None
    for place, text in enumerate(sets or ()):
        with suppress(SpecError, TrainerError):  # the others need it
            if answer_of([*sets[:place], *sets[place + 1 :]]) == whole:
                print_errors([f"--set {text} changes nothing of this answer"])
