"""A finished response for reward and evaluation functions, and its score."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_SHOWN = 80
"""Most characters of a prompt or a response that an error message quotes."""
SCORE, STOPPED = "score", "stopped_by_limits"
"""Keys in a function's result for a response: the score (default: the parts' sum); 1 if limits ended the judgement."""
LOST, UNSERVED = "sandboxes_lost", "found_no_sandbox"
"""Further keys: number of sandboxes that were lost while they judged the response; 1 if it found no sandbox."""
EXPECTED = "a finite number (float32)"
"""Words for a valid score, for error messages."""


def is_score(value: float) -> bool:
    """Whether a number is finite as float32, the type of scores in a batch."""
    return abs(value) <= 3.4028234663852886e38  # the largest finite float32


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt and its response; `str(sample)` names the sample in a message."""

    step: int | None
    """Training step of the response; 0 and below: a draw of an evaluation; None: a sample made up to try code."""
    row: int
    """Row of the response in the step's batch."""
    prompt: str
    response: str
    finished: bool
    """Whether the response ended with an end token."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Values of those columns of the prompt's data row that reward functions and services get, by column."""

    def __str__(self) -> str:
        if self.step is None:
            place = "one that is tried before the run"
        else:
            place = f"row {self.row} of step {self.step}" if self.step > 0 else f"held-out row {self.row}"
        return f"{place}, prompt {_shown(self.prompt)}, response {_shown(self.response)}"


@dataclass(frozen=True)
class Score:
    """Score of a response by the reward's code: a user's function, a verifier, a service or a judge."""

    value: float | None
    """Score of the response; None: the response is left out of training."""
    parts: Mapping[str, float | None] = field(default_factory=dict)
    """Named parts of the reward besides the score, for the metrics."""


def _shown(text: str) -> str:
    shown = json.dumps(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "...", ensure_ascii=False)
    return shown.encode(errors="backslashreplace").decode()  # a lone surrogate cannot be encoded
