"""The error of `rlhf import`."""

from typing import ClassVar

from rlhf_api.exit_codes import ExitCode


class ConversionError(Exception):
    """A configuration that cannot be read, or that becomes no valid manifest. Its text is one sentence a line."""

    exit_code: ClassVar[ExitCode] = ExitCode.SPEC
