"""The errors of the trainer, each with the exit code by which the operator classifies it.

`str(error)` is one sentence, or several in a line each, and names the field of the manifest or the file; a user sees
it without a traceback.
"""

import errno
from collections.abc import Sequence
from typing import ClassVar, Literal

from rlhf_api.exit_codes import ExitCode

EXTRAS = {"matplotlib": "plots"} | dict.fromkeys(("wandb", "mlflow", "opentelemetry"), "trackers")
"""Third-party package -> extra of rlhf-operator that installs it."""


class TrainerError(Exception):
    """An error that the trainer raises itself; `exit_code` is the exit code of the process if nothing catches it."""

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL
    host = ""
    """Machine, or on a cluster the pod, of the rank that caused the error; empty if that is unknown."""


class ConfigError(TrainerError):
    """Error of a manifest that does not fit this machine or this model."""

    exit_code = ExitCode.SPEC


class DataError(TrainerError):
    """Error of a data set that is missing, unreadable, or lacks what the manifest names."""

    exit_code = ExitCode.DATA


class EnvironmentProblem(TrainerError):  # noqa: N818 (EnvironmentError is a builtin)
    """Error of a device, a disk, Ray or a package that is missing or does not work."""

    exit_code = ExitCode.ENVIRONMENT


class MemoryProblem(TrainerError):  # noqa: N818 (MemoryError is a builtin)
    """Error of too little memory on the device or the machine."""

    exit_code = ExitCode.OUT_OF_MEMORY


class NumericsError(TrainerError):
    """Error of a value that is not finite, or of bytes whose checksum does not match."""

    exit_code = ExitCode.NUMERICS


class UserCodeError(TrainerError):
    """Error of code named in the manifest (a reward function, a data hook) that raised or returned the wrong thing."""

    exit_code = ExitCode.USER_CODE


class CommunicationError(TrainerError):
    """Error of a collective that failed, or of a worker that was lost."""

    exit_code = ExitCode.COMMUNICATION


class Paused(TrainerError):  # noqa: N818 (it is no fault)
    """End of a run after a checkpoint, by `spec.watch.causes` or `spec.checkpoint.pauseAfterStep`."""

    exit_code = ExitCode.PAUSED


class NoRowLeftError(DataError):
    """Error of a data set whose every row is bad or too long."""


def together(errors: Sequence[TrainerError]) -> TrainerError:
    """Join errors into one error of the first one's class, with the text of each error in a line."""
    return type(errors[0])("\n".join(map(str, errors)))


def user_error(error: BaseException) -> BaseException:
    """Return the error to show to a user: EnvironmentProblem if a foreign package is missing or a disk is full.

    Else it is `error` itself. While Ray waits, an error of a signal handler becomes the cause of a SystemError.
    """
    if isinstance(error, SystemError) and error.__cause__:
        return user_error(error.__cause__)
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("rlhf_"):
        extra = EXTRAS.get(error.name.partition(".")[0])
        remedy = f"; it is in rlhf-operator[{extra}]" if extra else ""
        return EnvironmentProblem(f"the Python package {error.name} is not installed{remedy}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvironmentProblem(f"{error.filename or 'what is printed'}: {error.strerror}")
    return error


def phase_after(reason: str) -> Literal["Stopped", "Failed"]:
    """Return the phase of a job that ended for this reason; a job that was stopped or paused goes on when run again."""
    return "Stopped" if reason in ("Stopped", "Paused") else "Failed"


def reason_of(code: int) -> str:
    """Return the word for an exit code in a job's status, such as `OutOfMemory`."""
    return "Stopped" if code in (ExitCode.SIGINT, ExitCode.SIGTERM) else ExitCode(code).name.title().replace("_", "")
