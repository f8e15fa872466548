"""Checks that the Hugging Face Hub has the models and data sets that a manifest names."""

import logging
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Literal

from rlhf_api.problems import one_line
from rlhf_trainer.errors import DataError, EnvironmentProblem

logger = logging.getLogger(__name__)

HUB = "hf://"
HUB_SECONDS, HUB_TRIES = 5.0, 3
"""Time limit of a request to the hub in seconds, and most requests for a name; with pauses 18 seconds in total."""
KIND = Literal["dataset", "model"]


_silence: list[Exception] = []
"""Error after which this process sends the hub no more requests, because the hub did not answer; empty before it."""


def require_hub(uri: str, field: str, kind: KIND) -> None:
    """Raise DataError if the hub does not answer within seconds, or does not have the model or data set.

    A process asks for each URI once, and never with HF_HUB_OFFLINE=1. Raises EnvironmentProblem if huggingface_hub is
    not installed.
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
            problem_text = f"the Hugging Face Hub has no {uri} that this user may read"
        case HFValidationError():
            problem_text = f"{uri} is no name on the hub, such as hf://organisation/name"
        case _:
            problem_text = f"{_unreached(uri, HUB_TRIES, problem)}; HF_HUB_OFFLINE=1 reads what was fetched before"
    raise DataError(f"{field}: {problem_text}") from problem


def cached_folder(uri: str, kind: KIND, revision: str | None) -> Path | None:
    """Return the folder of a model or data set in the hub's cache, named by its commit; None if it is not there.

    Large files in it are links to files that are named by their SHA-256.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError, HFValidationError):
        name = uri.removeprefix(HUB)
        return Path(snapshot_download(name, repo_type=kind, revision=revision, local_files_only=True))
    return None


@cache
def _problem(uri: str, kind: KIND) -> Exception | None:
    """Return the error with which the hub refuses the name, or the error of the connection; None if the name exists."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    for attempt in range(1, HUB_TRIES + 1):
        if _silence:
            return _silence[0]
        try:
            _ask(uri.removeprefix(HUB), kind)
        except (RepositoryNotFoundError, HFValidationError) as error:
            return error
        except Exception as error:  # noqa: BLE001 a proxy's error has a type of the HTTP client
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
    """Ask the hub for a name: raise its error for an unknown name, TimeoutError for no answer within HUB_SECONDS.

    A thread waits for the answer, because DNS and the connection to each address have no common time limit.
    """
    from huggingface_hub import HfApi

    answer = Future[object]()

    def ask() -> None:
        try:
            answer.set_result(HfApi().repo_info(name, repo_type=kind))
        except Exception as error:  # noqa: BLE001 it is raised below
            answer.set_exception(error)

    Thread(target=ask, daemon=True).start()
    if not wait([answer], HUB_SECONDS).done:
        raise TimeoutError(f"no answer within {HUB_SECONDS:g} s")
    answer.result()
