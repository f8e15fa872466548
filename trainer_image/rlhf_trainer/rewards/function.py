"""Functions of the user's, each called in a guarded process under a time limit; a failure becomes one sentence.

`UserFunction` is the trainer's end. A guarded process runs this module (`python -m`), so imports at its top are quick.
"""

import importlib
import inspect
import os
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_api.sandbox_server import receive, send
from rlhf_trainer.rewards.sample import EXPECTED, SCORE, Sample, Score, is_score
from rlhf_trainer.rewards.supervision import AnswerFailure, Kind, UserProcess, guard

ALWAYS_GIVEN = ("prompts", "responses", "finished")
"""Parameters of every user function, as in `rlhf_api.spec.functions`, whose import is too slow for this process."""
SEARCH_LIMITS = 3
"""Multiple of a call's time limit that the search for the sample at fault may take."""
MAX_SHOWN = 300
"""Most characters of an exception's text in a message."""
MAX_PARTS = 16
"""Most names of reward parts in the result of one call; each name gives two metrics."""
OWN_FILES = (
    "<",
    importlib.__file__,
    *(
        str(Path(__file__).parents[1] / each)
        for each in ("rewards/function.py", "rewards/supervision", "environments", "agents")
    ),
    str(Path(os.__file__).parent / "asyncio"),
    str(Path(sysconfig.get_path("purelib")) / "transformers"),
)
"""Prefixes of file names in a traceback that belong to the trainer or to a library, not to the user's code."""
LIBRARIES = tuple(sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib"))
"""Folders of Python and of installed packages; a traceback's line there is shown only if no line is the user's."""


class WrongAnswerError(Exception):
    """Error for a value of a wrong type from a user's environment; the text follows the method's name in a sentence."""

    def __init__(self, what: str, *, kind: Kind = "raised") -> None:
        super().__init__(what)
        self.kind = kind


class UserFunction:
    """User's function, called with (prompts, responses, whether each ended by itself, **columns, **arguments).

    It returns a score for each response: a number, None, or named parts. A guarded process imports it at once.
    """

    def __init__(
        self,
        entrypoint: str,
        *,
        arguments: Mapping[str, Any],
        seconds: float,
        deadline: float,
        path: str,
        called: str = "",
    ) -> None:
        """Start the process. path, called: field and name in errors; seconds, deadline: limits of call and `scores`."""
        self._name, self._arguments = f"{path}: {called or entrypoint}", dict(arguments)
        self._seconds, self._deadline = seconds, deadline
        self._process = UserProcess("rlhf_trainer.rewards.function", entrypoint)

    def ready(self) -> None:
        """Wait until the guarded process has imported the user's module; UserCodeError if it cannot."""
        if failure := self._process.await_import():
            raise self._error(failure.what)

    def scores(self, samples: Sequence[Sample]) -> list[Score]:
        """Return a score for each sample. UserCodeError, with the sample at fault, if the function gives none."""
        if not samples:
            return []
        until = time.monotonic() + self._deadline
        answer = self._ask(samples)
        if isinstance(answer, AnswerFailure):
            failure, sample = self._find_sample(answer, samples, until=until)
            self.close()
            raise self._error(f"{failure.what}; {sample}")
        return answer

    def close(self) -> None:
        """End the function's process and all its descendants."""
        self._process.close()

    def _error(self, sentence: str) -> Exception:
        from rlhf_trainer.errors import UserCodeError  # imports pydantic: seconds in the function's process

        return UserCodeError(f"{self._name} {sentence}")

    def _ask(self, samples: Sequence[Sample]) -> list[Score] | AnswerFailure:
        call = {
            "prompts": [sample.prompt for sample in samples],
            "responses": [sample.response for sample in samples],
            "finished": [sample.finished for sample in samples],
            "columns": {name: [sample.columns[name] for sample in samples] for name in samples[0].columns},
            "arguments": self._arguments,
        }
        answer = self._process.call(call, seconds=self._seconds)
        if isinstance(answer, AnswerFailure):
            return answer
        if problem := answer.get("problem"):
            return AnswerFailure(problem, answer.get("index"))
        return [Score(*score) for score in answer["scores"]]

    def _find_sample(
        self, failure: AnswerFailure, samples: Sequence[Sample], *, until: float
    ) -> tuple[AnswerFailure, str]:
        """Return the failure and words on its sample: the known one, or the first that fails when called alone."""
        if failure.index is not None or len(samples) == 1:
            return failure, f"the sample is {samples[failure.index or 0]}"
        first = f"the first of the {len(samples)} is {samples[0]}"
        self._process.await_import()  # the time of a new start does not count for the search
        last_start = min(until - self._seconds, time.monotonic() + SEARCH_LIMITS * self._seconds)
        for sample in samples:
            if time.monotonic() >= last_start:
                return failure, f"there was no time to find the sample, {first}"
            if isinstance(again := self._ask([sample]), AnswerFailure):
                return again, f"the sample is {sample}"
        return failure, f"no sample does it by itself, {first}"


def serve(channel: socket.socket, entrypoint: str) -> None:
    """Import the function, report a failure, and answer calls until the trainer hangs up.

    An answer is {"scores": [(score, parts), ...]}, or {"problem": sentence, "index": index of the sample, if known}.
    """
    (function,), problem = import_all(entrypoint)
    send(channel, {"problem": problem.removeprefix(f"{entrypoint} ")})
    mine = os.getpid()
    with suppress(EOFError):
        while True:
            answer = _answer(function, receive(channel))
            if os.getpid() != mine:  # the function forked and returned in both processes
                return
            send(channel, answer)


def import_all(entrypoints: str) -> tuple[list[Any], str]:
    """Return the objects of entry points that are separated by commas, and why the first bad one cannot be imported."""
    found: list[Any] = []
    problem = ""
    for each in entrypoints.split(","):
        try:
            found.append(imported(each))
        except BaseException as error:  # noqa: BLE001 whatever the user's module does
            module: ModuleType | None = sys.modules.get(each.partition(":")[0])
            problem = problem or f"{each} cannot be imported: {description_of(error, module)}"
            found.append(None)
    return found, problem


def imported(entrypoint: str) -> Callable[..., Any]:
    """Import the function or class of an entry point; TypeError if the object cannot be called."""
    module, _, name = entrypoint.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"it is {kind_of(function)}, not a function")
    return function


def _answer(function: Callable[..., Any], call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        answer = _call(function, call)
    except BaseException as error:  # noqa: BLE001 SystemExit as well: whatever the user's code raises
        return {"problem": f"raised {description_of(error, function)}"}
    return {**answer, "problem": f"{answer['problem']}{place_of(function)}"} if "problem" in answer else answer


def _call(function: Callable[..., Any], call: Mapping[str, Any]) -> dict[str, Any]:
    parameters: Mapping[str, inspect.Parameter] = {}
    with suppress(TypeError, ValueError):  # a function in C may not show its parameters
        parameters = inspect.signature(function).parameters
    given = {**_columns_for(parameters, call["columns"]), **call["arguments"]}
    required = [
        name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY and each.default is each.empty
    ]
    if missing := [name for name in required if name not in given]:
        return {"problem": f"needs {missing[0]}, which is no column that the data names and no argument", "index": 0}
    returned = function(call["prompts"], call["responses"], call["finished"], **given)
    if inspect.iscoroutine(returned):
        import asyncio  # a tenth of a second, for async functions only

        returned = asyncio.run(returned)
    return _checked(returned, count=len(call["prompts"]))


def _columns_for(parameters: Mapping[str, inspect.Parameter], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data columns that a function has parameters for, without names that are given by position already."""
    by_position = {name for name, each in parameters.items() if each.kind is each.POSITIONAL_ONLY}
    others = {name: values for name, values in columns.items() if name in by_position or name not in ALWAYS_GIVEN}
    if not parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return others
    return {name: values for name, values in others.items() if name in parameters}


def _checked(returned: Any, *, count: int) -> dict[str, Any]:
    if isinstance(returned, str | bytes | Mapping | AbstractSet) or not isinstance(returned, Iterable):
        return {"problem": f"returned {kind_of(returned)}, expected a list with a number for each response"}
    values = list(islice(returned, count + 1))
    if len(values) != count:
        found = f"{len(values)} values" if len(values) < count else f"more than {count} values"
        return {"problem": f"returned {found} for {count} responses"}
    scores = []
    for index, value in enumerate(values):
        try:
            scores.append(_score(value))
        except ValueError as error:
            return {"problem": f"returned {error}", "index": index}
    if len({name for _, parts in scores for name in parts}) > MAX_PARTS:
        return {"problem": f"returned more than {MAX_PARTS} different parts", "index": 0}
    return {"scores": scores}


def _score(value: Any) -> tuple[float | None, dict[str, float | None]]:
    """Return (score, named parts) of a function's value for one response; ValueError for a value that is no score."""
    if not isinstance(value, Mapping):
        return number_of(value), {}
    if names := [name for name in value if not (isinstance(name, str) and name.isidentifier())]:
        raise ValueError(f"a part named {str(names[0])[:MAX_SHOWN]!r}, expected letters, digits and '_'")
    parts = {name: number_of(part) for name, part in value.items()}
    if SCORE in parts:
        return parts.pop(SCORE), parts
    there = [part for part in parts.values() if part is not None]
    return number_of(sum(there)) if there else None, parts


def kind_of(value: Any) -> str:
    """Return the type of a value in words for a message, such as `a value of type str`."""
    return "None" if value is None else f"a value of type {type(value).__name__}"


def number_of(value: Any) -> float | None:
    """Return a number of any library as a float, None as None; ValueError for others, NaN, and infinity as float32."""
    if value is None:
        return None
    number = None
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # tensors raise RuntimeError
        number = None if isinstance(value, str | bytes) else float(value)
    if number is None:
        raise ValueError(f"{kind_of(value)}, expected a number")
    if not is_score(number):
        raise ValueError(f"{number}, expected {EXPECTED}")
    return number


def description_of(error: BaseException, failed: object) -> str:
    """Return an error in one line: its class, its text, and the innermost line of its traceback in a user's file.

    failed: the called object; if the traceback has no such line, the line where this object is defined is shown.
    """
    message: object = error
    frames = [(each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:  # the text ends with the file's name, without its folder
        message, frames = error.msg, [*frames, (error.filename, error.lineno)]
    text = ""
    with suppress(Exception):  # `str` of the user's own exception may fail
        text = " ".join(str(message).split())[:MAX_SHOWN]
    called = [frame for frame in frames if not frame[0].startswith(OWN_FILES)]
    theirs = [frame for frame in called if not frame[0].startswith(LIBRARIES)] or called
    where = " ({}:{})".format(*theirs[-1]) if theirs else place_of(failed)
    described = f"{type(error).__name__}{': ' if text else ''}{text}{where}"
    return described.encode(errors="backslashreplace").decode()  # a lone surrogate cannot be encoded


def place_of(what: object) -> str:
    """Return ` (file:line)` where a user's function or class begins, ` (file)` for a module; empty for our own code."""
    if str(getattr(what, "__module__", None)).startswith("rlhf_trainer."):
        return ""
    from rlhf_api.own_code import defined_at  # a slow import, which only a failure needs

    return defined_at(what)


if __name__ == "__main__":
    guard(serve)
