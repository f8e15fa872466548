"""Programs of agents, a user's function or a command, for a guarded process: so the imports here are quick."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_trainer.rewards.function import MAX_SHOWN, WrongAnswerError, imported
from rlhf_trainer.rewards.supervision import ending_of

TAIL_BYTES = 4096
"""Number of the last bytes of a command's standard error in which its last line is looked for."""


class Agent:
    """Program of one episode, which `Environments` calls as its method `run`."""

    def __init__(
        self, *, entrypoint: str | None, command: Sequence[str] | None, arguments: Mapping[str, Any] | None
    ) -> None:
        """entrypoint: the user's function; command: a command instead; arguments: those of the function."""
        self._function = imported(entrypoint) if entrypoint else None
        self._command, self._arguments = command or (), arguments or {}

    def run(self, given: Mapping[str, Any]) -> Any:
        """Run the program; returns the function's result, which may be awaited, or None for a command.

        given: `row` of the data, and `variables` of the environment. A command that fails is a WrongAnswerError.
        """
        os.environ.update(given["variables"])
        if self._function:
            return self._function(given["row"], **self._arguments)
        return self._call_command(json.dumps(given["row"]).encode())

    def _call_command(self, row: bytes) -> None:
        """Run the command; its standard input, which RLHF_ROW names, is a file in memory that holds the row."""
        handle = os.memfd_create("row")
        with os.fdopen(handle, "wb") as given, tempfile.TemporaryFile() as errors:
            given.write(row)
            given.flush()
            given.seek(0)
            variables = {**os.environ, "RLHF_ROW": f"/proc/{os.getpid()}/fd/{handle}"}
            code = subprocess.run(self._command, stdin=given, stderr=errors, env=variables, check=False).returncode
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = errors.read().decode(errors="replace").split("\n")
        if code:
            said = next((": " + line.strip()[:MAX_SHOWN] for line in reversed(lines) if line.strip()), "")
            raise WrongAnswerError(f"no result, as the command {ending_of(code)}{said}")
