"""What users write: functions that are right, and functions that do what none should."""

from __future__ import annotations

import asyncio
import collections
import ctypes
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

if note := os.environ.get("NOTE_IMPORTS"):
    with Path(note).open("a") as file:
        file.write("imported\n")

time.sleep(float(os.environ.get("IMPORT_TAKES", "0")))

BAD = "bad"
not_a_function = 3


async def lengths_later(prompts: list[str], responses: list[str], finished: list[bool]) -> list[float]:
    await asyncio.sleep(0)
    return lengths(prompts, responses, finished)


def lengths(prompts: list[str], responses: list[str], finished: list[bool], *, scale: float = 1.0) -> list[float]:
    return [
        scale * (len(prompt) + len(response) + done)
        for prompt, response, done in zip(prompts, responses, finished, strict=True)
    ]


def fills_the_disk(_: list[str], responses: list[str], __: list[bool], *, file: str) -> list[float]:
    """Of a file, at a batch; one response is only tried."""
    if len(responses) > 1:
        with suppress(OSError), Path(file).open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
    return [1.0] * len(responses)


def right(_: list[str], responses: list[str], __: list[bool], *, answer: list[str], more: float = 1.0) -> list[float]:
    """Asks for one column, whatever others there are."""
    return [more * (response == wanted) for response, wanted in zip(responses, answer, strict=True)]


def all_kinds_of_scores(*_: object) -> list[Any]:
    parts = {"right": True, "brief": 0.25, "rare": None}
    numbers = [True, np.float32(0.5), Fraction(5, 2), Decimal("1.5"), np.ones(1) * 3]
    return [*numbers, None, parts, {"score": 2, "right": 7}, {"rare": None}]


def a_tensor(*_: object) -> Any:
    import torch

    return torch.tensor([0.0, 0.5, 1.0])


def an_array(*_: object) -> Any:
    return np.array([0.0, 0.5, 1.0])


def a_column_of_numbers(*_: object) -> Any:
    return np.array([[0.0], [0.5], [1.0]])


def many_parts(_: list[str], responses: list[str], __: list[bool]) -> list[dict[str, float]]:
    return [{f"part_{number}": 1.0 for number in range(17)} for _ in responses]


def every_other(*_: object, size: list[int]) -> list[Any]:
    """A score where the column is odd, and none elsewhere."""
    return [{"score": 1.0, "size": 3.0} if value % 2 else {"size": None, "score": None} for value in size]


def stopped_twice(*_: object, size: list[int]) -> list[dict[str, float]]:
    """As a verifier marks the responses whose judgement it has ended."""
    return [{"score": 0.0, "stopped_by_limits": 1.0} if value < 2 else {"score": 1.0} for value in size]


def sizes(*_: object, size: list[int]) -> list[float]:
    return [float(value) for value in size]


def names_of_columns(_: list[str], responses: list[str], __: list[bool], **columns: list[Any]) -> list[float]:
    """Takes all columns."""
    assert all(len(values) == len(responses) for values in columns.values())
    return [float(len(columns))] * len(responses)


def _when_bad(do: Callable[[], Any]) -> Callable[[list[str], list[str], list[bool]], list[Any]]:
    """A function that scores 1, and does something at a bad response."""

    def score(_: list[str], responses: list[str], __: list[bool]) -> list[Any]:
        return [do() if response == BAD else 1.0 for response in responses]

    return score


def _endless_in_c() -> None:
    collections.deque(itertools.repeat(0), maxlen=0)


def _segfault() -> None:
    ctypes.string_at(0)


def _raise() -> None:
    raise ZeroDivisionError("nothing to divide by\nat all")


def _kill_the_guard() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def _leave_processes() -> float:
    """Children that leave the session, and grandchildren whose parent has ended."""
    sleeper = [sys.executable, "-c", "import time; time.sleep(1000)"]
    subprocess.Popen(sleeper, start_new_session=True)
    subprocess.run(["sh", "-c", "sleep 1000 &"], check=True)
    if not os.fork():
        time.sleep(1000)
    return 2.0


def _shut_the_sockets() -> None:
    """Say to the trainer that nothing will come any more, and go on."""
    for file in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):
            socket.socket(fileno=os.dup(file)).shutdown(socket.SHUT_WR)
    time.sleep(1000)


def _raise_in_a_library() -> None:
    json.loads("{")


def _raise_what_cannot_be_written() -> None:
    raise ValueError("half a pair: \ud800")


raises = _when_bad(_raise)
raises_in_a_library = _when_bad(_raise_in_a_library)
raises_half_a_character = _when_bad(_raise_what_cannot_be_written)
is_ended_in_real_time = _when_bad(lambda: os.kill(os.getpid(), 35))
shuts_its_sockets = _when_bad(_shut_the_sockets)
exits = _when_bad(lambda: sys.exit("enough"))
leaves = _when_bad(lambda: os._exit(3))
is_killed = _when_bad(lambda: os.kill(os.getpid(), signal.SIGKILL))
kills_its_guard = _when_bad(_kill_the_guard)
kills_its_group = _when_bad(lambda: os.killpg(0, signal.SIGKILL))
crashes = _when_bad(_segfault)
never_returns = _when_bad(_endless_in_c)
sleeps = _when_bad(lambda: time.sleep(1000))
nan = _when_bad(lambda: math.nan)
beyond_float32 = _when_bad(lambda: 1e300)
huge_number = _when_bad(lambda: 10**400)
text = _when_bad(lambda: "1.0")
part_that_is_text = _when_bad(lambda: {"right": "yes"})
part_without_a_name = _when_bad(lambda: {3: 1.0})
several_numbers = _when_bad(lambda: np.ones(2))
leaves_processes = _when_bad(_leave_processes)
closes_everything = _when_bad(lambda: os.closerange(0, 100_000))
shouts = _when_bad(lambda: 5.0 if sys.stdout.write("x" * 10_000_000) else 0.0)


def always_raises(*_: object) -> list[float]:
    raise ZeroDivisionError("nothing to divide by")


def always_sleeps(*_: object) -> list[float]:
    time.sleep(1000)
    return []


def always_is_killed(*_: object) -> list[float]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def comes_back_twice(_: list[str], responses: list[str], __: list[bool]) -> list[float]:
    """Forks, and returns in both processes."""
    if not os.fork():
        time.sleep(0.2)
    return [float(len(response)) for response in responses]


def a_set(_: list[str], responses: list[str], __: list[bool]) -> set[float]:
    return {float(number) for number in range(len(responses))}


def one_number(*_: object) -> float:
    return 1.0


def one_for_all(*_: object) -> list[float]:
    return [1.0]


def without_end(*_: object) -> Any:
    return itertools.repeat(1.0)


def last_letter(_: list[str], responses: list[str], __: list[bool]) -> list[float]:
    return [float(ord(response[-1])) for response in responses]
