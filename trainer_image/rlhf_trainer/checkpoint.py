"""Checkpoints of a job, in a folder of this machine or in an object store (by fsspec).

A checkpoint is a folder `step-000010/`, and is whole only if it has all files listed in COMPLETE. The folder holds
`state.json` and other files of the controller, and a folder per model, written by the model's ranks. COMPLETE is
written last and lists every other file with its size, so an unfinished checkpoint never counts as whole.
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from rlhf_trainer.storage import open_storage, storage_errors
from rlhf_trainer.upload_pace import UploadPace

logger = logging.getLogger(__name__)

COMPLETE, STATE = "COMPLETE", "state.json"
PREFIX = "step-"
PROBE = ".probe"
SLICE, BLOCK, MAX_PARTS = 2**20, 2**18, 8_000
"""Bytes that are paced at a time, unit of the parts of a file in GCS, and most parts of a file (S3 allows 10,000)."""
MIN_BLOCKS = 20
"""Smallest part of a file in S3, in blocks (5 MiB)."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One checkpoint of a job: a folder with the files of a step, whole or not."""

    step: int
    uri: str
    problem: str = ""
    """Reason why the checkpoint is not whole; empty if it is."""
    bytes: int = 0
    """Total bytes of the checkpoint's files."""
    saved_at: datetime | None = None
    """Time at which the checkpoint's COMPLETE was written; None: there is none, or it cannot be used."""

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder, such as `step-000010`."""
        return f"{PREFIX}{self.step:06d}"

    @property
    def is_whole(self) -> bool:
        return not self.problem

    def text(self, name: str) -> str:
        """Read the text of one of the controller's files in the checkpoint."""
        with storage_errors(self.uri):
            files, path = open_storage(self.uri)
            text: str = files.cat_file(f"{path}/{name}").decode()
        return text

    def state(self) -> dict[str, Any]:
        """Read the controller's state after the checkpoint's step (`state.json`)."""
        state: dict[str, Any] = json.loads(self.text(STATE))
        return state

    def condemn(self, problem: str) -> None:
        """Mark this damaged checkpoint, whose file sizes look right, so that no run resumes from it again."""
        with storage_errors(self.uri):
            files, path = open_storage(self.uri)
            files.pipe_file(f"{path}/{COMPLETE}", json.dumps({"problem": problem}).encode())


class CheckpointStore:
    """The checkpoints below one address, a folder or an `s3://` or `gs://` URL."""

    def __init__(self, uri: str) -> None:
        """Open the storage; EnvironmentProblem if the package for this kind of address is missing."""
        self.uri = uri.rstrip("/")
        with storage_errors(self.uri):
            self._files, self._path = open_storage(self.uri)

    @property
    def is_local(self) -> bool:
        return isinstance(self._files, LocalFileSystem)

    def try_writing(self) -> None:
        """Write and delete a test file, before training starts; EnvironmentProblem if nothing can be written."""
        with storage_errors(self.uri):
            self._make_folder(self._path)
            self._files.pipe_file(f"{self._path}/{PROBE}", b"")
            self._files.rm_file(f"{self._path}/{PROBE}")

    def all(self) -> list[Checkpoint]:
        """List all checkpoints below the address, whole or not, oldest first."""
        with storage_errors(self.uri):
            if not self._files.isdir(self._path):
                return []
            entries = self._files.ls(self._path, detail=True)
            names = [entry["name"].rsplit("/", 1)[-1] for entry in entries if entry["type"] == "directory"]
            steps = [name for name in names if name.startswith(PREFIX) and name.removeprefix(PREFIX).isdigit()]
            return [self._inspect(name) for name in sorted(steps, key=lambda name: int(name.removeprefix(PREFIX)))]

    def newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint; None if there is none."""
        return next((checkpoint for checkpoint in reversed(self.all()) if checkpoint.is_whole), None)

    def begin(self, step: int) -> str:
        """Make an empty folder for a step's checkpoint; returns its address. No other checkpoint may be under way."""
        name = f"{PREFIX}{step:06d}"
        with storage_errors(self.uri):
            self._abort_uploads()
            self._remove(name)
            self._make_folder(f"{self._path}/{name}")
        return f"{self.uri}/{name}"

    def complete(self, uri: str, texts: Mapping[str, str]) -> Checkpoint:
        """Add the controller's files (name -> text) and, last, COMPLETE; the ranks have written their files before."""
        name = uri.rsplit("/", 1)[-1]
        folder = f"{self._path}/{name}"
        with storage_errors(uri):
            for file, text in texts.items():
                self._files.pipe_file(f"{folder}/{file}", text.encode())
            now = datetime.now(UTC).isoformat(timespec="seconds")
            marker = json.dumps({"savedAt": now, "files": self._sizes(folder)}, indent=1)
            self._files.pipe_file(f"{folder}/{COMPLETE}.unfinished", marker.encode())
            self._files.mv(f"{folder}/{COMPLETE}.unfinished", f"{folder}/{COMPLETE}")
            return self._inspect(name)

    def prune(self, keep_last: int, *, best: int | None = None) -> None:
        """Delete checkpoints older than the newest whole one, but keep the newest `keep_last` whole ones and `best`."""
        checkpoints = self.all()
        whole = [checkpoint.step for checkpoint in checkpoints if checkpoint.is_whole]
        with storage_errors(self.uri):
            for checkpoint in checkpoints:
                is_kept = checkpoint.step in whole[-keep_last:] or (checkpoint.step == best and checkpoint.is_whole)
                if not is_kept and whole and checkpoint.step < whole[-1]:
                    self._remove(checkpoint.name)

    def clear(self, *, but: int | None = None) -> None:
        """Delete every checkpoint below the address, whole or not, except the one of the step `but`."""
        for checkpoint in self.all():
            with storage_errors(self.uri):
                if checkpoint.step != but:
                    self._remove(checkpoint.name)

    def _make_folder(self, path: str) -> None:
        """Make a folder on this machine; object stores have no folders, and makedirs would create a bucket."""
        if self.is_local:
            self._files.makedirs(path, exist_ok=True)

    def _abort_uploads(self) -> None:
        """Delete parts of files that killed ranks had sent to S3: no listing shows these parts, but they cost money."""
        if "s3" not in self._files.protocol:
            return
        bucket, key, _ = self._files.split_path(self._path)
        try:
            found = self._files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/")
            for upload in found.get("Uploads", ()):
                self._files.abort_mpu(bucket, upload["Key"], upload["UploadId"])
        except OSError as error:  # the store lacks this call, or the key its permission
            logger.warning("%s: parts of unfinished uploads may be left: %s", self.uri, error)

    def _remove(self, name: str) -> None:
        """Delete a checkpoint's folder, COMPLETE first, so that a half deleted checkpoint never counts as whole."""
        folder = f"{self._path}/{name}"
        if self._files.exists(f"{folder}/{COMPLETE}"):
            self._files.rm_file(f"{folder}/{COMPLETE}")
        if self._files.exists(folder):
            self._files.rm(folder, recursive=True)

    def _sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of every file in a checkpoint's folder but COMPLETE, by name in the folder."""
        found = self._files.find(folder, detail=True)
        names = {path: path.removeprefix(folder).lstrip("/") for path in found}
        return {names[path]: int(entry["size"]) for path, entry in found.items() if names[path] != COMPLETE}

    def _inspect(self, name: str) -> Checkpoint:
        """Return the checkpoint in a folder; its `problem` says how its files differ from the list in COMPLETE."""
        folder = f"{self._path}/{name}"
        sizes = self._sizes(folder)
        problem, saved_at = "it was not finished (no COMPLETE)", None
        if self._files.exists(f"{folder}/{COMPLETE}"):
            problem, saved_at = verify_marker(self._files.cat_file(f"{folder}/{COMPLETE}"), sizes)
        return Checkpoint(
            step=int(name.removeprefix(PREFIX)),
            uri=f"{self.uri}/{name}",
            problem=problem,
            bytes=sum(sizes.values()),
            saved_at=saved_at,
        )


def verify_marker(marker: bytes, found: Mapping[str, int]) -> tuple[str, datetime | None]:
    """Compare COMPLETE's text with the found files (name -> bytes); returns (problem or empty text, time of saving)."""
    try:
        document = json.loads(marker)
        if "problem" in document:
            return str(document["problem"]), None
        return difference(document["files"], found), datetime.fromisoformat(document["savedAt"])
    except (ValueError, KeyError, TypeError):
        return f"{COMPLETE} cannot be read", None


def difference(listed: Mapping[str, int], found: Mapping[str, int]) -> str:
    """Return in words the first file in COMPLETE that is missing or has another size; empty if there is none."""
    for name, size in listed.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != size:
            return f"{name} has {found[name]:,} bytes, not {size:,}"
    return ""


class UploadFolder:
    """Folder in which a rank writes files for an address: the address itself, or a temporary folder to upload."""

    def __init__(self, uri: str, pace: UploadPace | None = None) -> None:
        with storage_errors(uri):
            self._files, self._path = open_storage(uri)
        self._uri, self._pace = uri, pace
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
                    self._send(file, f"{self._path}/{file.relative_to(self.folder).as_posix()}")
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _send(self, file: Path, target: str) -> None:
        if self._pace is None:
            self._files.put_file(str(file), target)
            return
        block = BLOCK * max(MIN_BLOCKS, -(-file.stat().st_size // (MAX_PARTS * BLOCK)))
        with file.open("rb") as source, self._files.open(target, "wb", block_size=block) as sink:
            while part := source.read(SLICE):
                self._pace.take(len(part))
                sink.write(part)
