"""Programs of agents (a user's function or a command) for a guarded process, so this module imports quickly."""

import inspect
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlhf_trainer.rewards.function import MAX_SHOWN, WrongAnswerError, imported
from rlhf_trainer.rewards.supervision import Kind, ending_of

TAIL_BYTES = 4096
"""Number of the last bytes of a command's standard error in which its last line is looked for."""


class Agent:
    """Program of one episode; `Environments` runs it by the method `run`."""

    def __init__(
        self, *, entrypoint: str | None, command: Sequence[str] | None, arguments: Mapping[str, Any] | None
    ) -> None:
        """entrypoint: the user's function; command: a command instead; arguments: those of the function."""
        self._function = imported(entrypoint) if entrypoint else None
        self._command, self._arguments = command or (), arguments or {}

    def check(self, given: None) -> None:  # noqa: ARG002 a call of an episode has one argument
        """Raise an error that would end every episode: a function refuses the arguments, or a command is missing."""
        if self._function:
            with suppress(ValueError):  # a function in C may not show its parameters
                inspect.signature(self._function).bind({}, **self._arguments)
        elif shutil.which(self._command[0]) is None:
            raise FileNotFoundError(f"there is no program {self._command[0]}")

    def run(self, given: Mapping[str, Any]) -> Any:
        """Run the program; returns the function's result, which may be awaited, or None for a command.

        given: `row` of the data, and `variables` of the environment. A command gets the row as its standard input;
        WrongAnswerError if it fails.
        """
        os.environ.update(given["variables"])
        if self._function:
            return self._function(given["row"], **self._arguments)
        return self._call_command(json.dumps(given["row"]).encode())

    def _call_command(self, row: bytes) -> None:
        with tempfile.TemporaryFile() as errors:
            code = subprocess.run(self._command, input=row, stderr=errors, check=False).returncode
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = errors.read().decode(errors="replace").split("\n")
        if code:
            last = next((": " + line.strip()[:MAX_SHOWN] for line in reversed(lines) if line.strip()), "")
            kind: Kind = "raised" if code > 0 else "ended"
            raise WrongAnswerError(f"no result, as the command {ending_of(code)}{last}", kind=kind)
