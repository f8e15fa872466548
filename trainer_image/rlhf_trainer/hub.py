"""The Hugging Face Hub: whether it answers for what a manifest names."""

from __future__ import annotations

import logging
import time
from functools import cache
from threading import Thread
from typing import Literal

from rlhf_api.problems import one_line
from rlhf_trainer.errors import DataError, EnvironmentProblem

logger = logging.getLogger(__name__)

HUB = "hf://"
HUB_SECONDS, HUB_TRIES = 5.0, 3
"""How long the hub may take to answer, and how often it is asked: with the pauses in between 18 seconds."""
KIND = Literal["dataset", "model"]


_silence: list[Exception] = []
"""Why the hub did not answer: it is asked nothing more in this process."""


def require_hub(uri: str, field: str, kind: KIND) -> None:
    """DataError where the hub does not answer, which its client would take minutes to say, or has no such thing.

    Asks once in a process, never with HF_HUB_OFFLINE=1. EnvironmentProblem without its client.
    """
    try:
        from huggingface_hub import constants
        from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(f"{field}: {uri} is on the hub, and huggingface_hub is not installed") from error
    problem = None if constants.is_offline_mode() else _problem(uri, kind)
    match problem:
        case None:
            return
        case RepositoryNotFoundError():
            said = f"the Hugging Face Hub has no {uri} that this user may read"
        case HFValidationError():
            said = f"{uri} is no name on the hub, such as hf://organisation/name"
        case _:
            said = f"{_unreached(uri, HUB_TRIES, problem)}; HF_HUB_OFFLINE=1 reads what was fetched before"
    raise DataError(f"{field}: {said}") from problem


@cache
def _problem(uri: str, kind: KIND) -> Exception | None:
    """What the hub says where it has no such thing, or why it does not answer."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    for attempt in range(1, HUB_TRIES + 1):
        if _silence:
            return _silence[0]
        try:
            _ask(uri.removeprefix(HUB), kind)
        except (RepositoryNotFoundError, HFValidationError) as error:
            return error
        except Exception as error:  # noqa: BLE001 a proxy's error is of the HTTP client's own kind
            found = error
        else:
            return None
        if attempt < HUB_TRIES:
            logger.warning(_unreached(uri, attempt, found))
            time.sleep(attempt)
    if not isinstance(found, HfHubHTTPError):
        _silence.append(found)
    return found


def _unreached(uri: str, attempt: int, error: Exception) -> str:
    why = one_line(str(error) or type(error).__name__, 200)
    return f"the Hugging Face Hub cannot be reached for {uri} (try {attempt} of {HUB_TRIES}: {why})"


def _ask(name: str, kind: KIND) -> None:
    """Raise what the hub answers for what it has not; TimeoutError where it takes too long.

    A thread waits for it: looking up a name, and trying each of its addresses, have no common time limit.
    """
    from huggingface_hub import HfApi

    raised: list[Exception] = []
    answered: list[object] = []

    def ask() -> None:
        try:
            answered.append(HfApi().repo_info(name, repo_type=kind))
        except Exception as error:  # noqa: BLE001 it is raised below
            raised.append(error)

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    if raised:
        raise raised[0]
    if not answered:
        raise TimeoutError(f"no answer within {HUB_SECONDS:g} s")
