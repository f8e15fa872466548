"""Addresses of folders, on this machine or in an object store (by fsspec)."""

from collections.abc import Iterator
from contextlib import contextmanager

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from rlhf_trainer.errors import EnvironmentProblem, NumericsError


def open_storage(uri: str) -> tuple[AbstractFileSystem, str]:
    """Return (file system, path in it) of a folder or a URL; credentials and endpoints come from the environment."""
    files, path = url_to_fs(uri, use_listings_cache=False)
    return files, path.rstrip("/")


@contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Turn any error of the storage in the block into an EnvironmentProblem that names the address."""
    try:
        yield
    except NumericsError as error:
        raise NumericsError(f"{uri}: {error}") from error
    except ImportError as error:
        raise EnvironmentProblem(f"{uri}: needs a package that is not installed: {error}") from error
    except Exception as error:  # each kind of storage raises errors of its own
        reason = " ".join(str(error).split())[:300]
        raise EnvironmentProblem(f"{uri}: {type(error).__name__}: {reason}") from error
