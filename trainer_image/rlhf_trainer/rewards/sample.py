"""A finished response, as rewards and evaluation functions see it."""

from __future__ import annotations

import json
from dataclasses import dataclass

SHOWN = 80
"""Characters of a text that a sentence shows."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt and its response; `str(sample)` names it in a sentence."""

    step: int
    """Number of the step; 0 and below are the draws of an evaluation."""
    row: int
    """Row of the step's batch."""
    prompt: str
    response: str
    finished: bool
    """Whether the response ended with end-of-text."""

    def __str__(self) -> str:
        place = f"row {self.row} of step {self.step}" if self.step > 0 else f"held-out row {self.row}"
        return f"{place}, prompt {_shown(self.prompt)}, response {_shown(self.response)}"


def _shown(text: str) -> str:
    """The beginning of a text, quoted, on one line."""
    shown = json.dumps(text if len(text) <= SHOWN else text[:SHOWN] + "...", ensure_ascii=False)
    return shown.encode(errors="backslashreplace").decode()  # half a surrogate pair can be written nowhere
