"""Exit codes of the trainer, which the operator classifies."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Causes of a run's end.

    OK: finished. INTERNAL: a defect of ours. SPEC: a wrong spec or usage. DATA: a wrong or missing data set.
    ENVIRONMENT: a device, the disk, Ray or a package is missing or broken. OUT_OF_MEMORY: host or device memory.
    NUMERICS: a value that is not finite, or a wrong checksum. USER_CODE: a reward function or data hook raised.
    COMMUNICATION: a collective failed or a worker was lost. SIGINT, SIGTERM: stopped by that signal after a checkpoint.
    SIGHUP, sent by a terminal that closes, ends a run as SIGTERM does.
    """

    OK = 0
    INTERNAL = 1
    SPEC = 2
    DATA = 3
    ENVIRONMENT = 4
    OUT_OF_MEMORY = 5
    NUMERICS = 6
    USER_CODE = 7
    COMMUNICATION = 8
    SIGINT = 130
    SIGTERM = 143
