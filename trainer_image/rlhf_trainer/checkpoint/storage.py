"""Folders on this machine and in object stores (by fsspec), upload and download."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from rlhf_trainer.errors import EnvironmentProblem


def open_storage(uri: str) -> tuple[AbstractFileSystem, str]:
    """(file system, path in it) of a folder or a URL; credentials and endpoints come from the environment."""
    files, path = url_to_fs(uri, use_listings_cache=False)
    return files, path.rstrip("/")


@contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Turn any error of the storage in the block into an EnvironmentProblem that names the address."""
    try:
        yield
    except ImportError as error:
        raise EnvironmentProblem(f"{uri}: needs a package that is not installed: {error}") from error
    except Exception as error:  # each kind of storage raises errors of its own
        reason = " ".join(str(error).split())[:300]
        raise EnvironmentProblem(f"{uri}: {type(error).__name__}: {reason}") from error


class UploadFolder:
    """The folder in which a rank writes files for an address: that address itself, or a temporary folder to upload."""

    def __init__(self, uri: str) -> None:
        with storage_errors(uri):
            self._files, self._path = open_storage(uri)
        self._uri = uri
        self._is_local = isinstance(self._files, LocalFileSystem)
        self.folder = Path(self._path) if self._is_local else Path(tempfile.mkdtemp(prefix="rlhf-checkpoint-"))
        self.folder.mkdir(parents=True, exist_ok=True)

    def upload(self) -> None:
        """Upload the temporary folder and delete it; does nothing for an address on this machine."""
        if self._is_local:
            return
        try:
            with storage_errors(self._uri):
                for file in sorted(path for path in self.folder.rglob("*") if path.is_file()):
                    self._files.put_file(str(file), f"{self._path}/{file.relative_to(self.folder).as_posix()}")
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def downloaded(uri: str) -> Iterator[Path]:
    """The folder of an address on this machine's disk, while the block runs."""
    with storage_errors(uri):
        files, path = open_storage(uri)
    if isinstance(files, LocalFileSystem):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="rlhf-checkpoint-") as folder:
        with storage_errors(uri):
            files.get(f"{path}/", f"{folder}/", recursive=True)
        yield Path(folder)
