"""End of a command of `rlhf`: an error becomes a sentence on stderr and the exit code of its kind."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from rlhf_api.exit_codes import ExitCode
from rlhf_planning.command_line import print_errors
from rlhf_trainer.errors import Paused, user_error
from rlhf_trainer.run.stopping import Stopped
from rlhf_trainer.run_folder.attempt import VARIABLE


def ending(work: Callable[[], None], *, debug: bool) -> tuple[int, str]:
    """Call `work`, print its error, and return (exit code, error text); internal errors in a pod print a traceback."""
    try:
        work()
    except (Exception, Stopped) as raised:  # noqa: BLE001 nothing above could show it to the user
        error = user_error(raised)
        code = getattr(error, "exit_code", None)
        is_defect = code in (None, ExitCode.INTERNAL)
        is_shown = debug or (is_defect and VARIABLE in os.environ)
        shown = traceback.format_exc().splitlines() if is_shown else []
        if code is None:
            first = (str(error).strip().splitlines() or [""])[0]
            hint = "" if is_shown else " (--debug shows the traceback)"
            print_errors([*shown, f"internal error: {type(error).__name__}: {first}{hint}"])
            return int(ExitCode.INTERNAL), f"{type(error).__name__}: {first}"
        lines = str(error).splitlines()
        print_errors([*shown, *(line if isinstance(error, Paused) else f"error: {line}" for line in lines)])
        return int(code), "; ".join(lines)
    return int(ExitCode.OK), ""


def leave(code: int) -> NoReturn:
    """End this process with an exit code; skip Python's exit handlers if the process's own Ray has ended before."""
    session = sys.modules.get("rlhf_trainer.run.session")  # an import takes a second; not imported: no Ray
    if session and session.how_ray_ended():
        sys.stdout.flush()
        os._exit(code)  # parts of Ray in this process wait for its servers, or crash
    sys.exit(code)
