"""Imports and calls user code in this process. Reward functions and environments run in their own processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from rlhf_api.own_code import defined_at, describe_error, line_of, package_of
from rlhf_trainer.errors import TrainerError, UserCodeError


@contextmanager
def own_code(entrypoint: str, path: str) -> Iterator[Callable[..., Any]]:
    """Yield the object that an entry point names, for calls within the block.

    Raises UserCodeError if the import or the block fails; the error's text begins with `path`, a field of the manifest.
    """
    module, _, name = entrypoint.partition(":")
    failed, at = "cannot be imported:", None
    try:
        imported = at = import_module(module)
        found = at = getattr(imported, name)
        failed = "raised"
        yield found
    except TrainerError:
        raise
    except Exception as error:
        where = line_of(error, [package_of(module)]) or defined_at(at)
        raise UserCodeError(f"{path}: {entrypoint} {failed} {describe_error(error)}{where}") from error
