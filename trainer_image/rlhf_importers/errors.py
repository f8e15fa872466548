"""Error of `rlhf import`, for a configuration that cannot be converted."""

from typing import ClassVar

from rlhf_api.exit_codes import ExitCode


class ConversionError(Exception):
    """Error for a configuration that cannot be read or becomes no valid manifest; its text is a sentence a line."""

    exit_code: ClassVar[ExitCode] = ExitCode.SPEC
