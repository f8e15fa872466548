"""Exit codes of the trainer, which the operator classifies."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Causes of a run's end, which docs/status.md explains; SIGHUP ends a run as SIGTERM does."""

    OK = 0
    INTERNAL = 1
    SPEC = 2
    DATA = 3
    ENVIRONMENT = 4
    OUT_OF_MEMORY = 5
    NUMERICS = 6
    USER_CODE = 7
    COMMUNICATION = 8
    PAUSED = 9
    SIGINT = 130
    SIGTERM = 143
