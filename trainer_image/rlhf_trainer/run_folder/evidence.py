"""run.json of a job's folder: where each attempt ran, and what the job read and made, with hashes of all files.

Manifest, seeds and slots are beside it in job.yaml, the layout in mapping.json.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any, Final, Literal, Required

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from rlhf_trainer.run_folder.attempt import replace

RUN, CHECKPOINT = "run.json", "checkpoint"
LABELS: Final = "rlhf.json"
"""File in a job's output that says what made it; it has no hash."""
MAX_ENTRIES = 100
"""Most attempts, and most things made, that run.json keeps: the newest."""
ATTEMPT = ("attempt", "began", "after")
"""Facts of an attempt besides its environment; `after` is the step that it continued from, 0: the start."""
Kind = Literal["model", "data", "code", "checkpoint"]


class Entry(TypedDict, total=False):
    """Something that a job read or made: one file, or the files of a folder."""

    name: Required[str]
    """Field of the manifest, such as `spec.data.train`; of what was made `model`, `data` or `checkpoint`."""
    kind: Required[Kind]
    uri: Required[str]
    revision: str
    """Commit of what comes from the hub, or of own code in git, then with `-dirty` if its files have changes."""
    step: int
    """Step after which it was made."""
    sha256: str
    """SHA-256 of the only file, or of the lines that `sha256sum` prints for the files in the order of their names."""
    files: dict[str, str]
    """SHA-256 by name of the file, empty if it was not hashed; in a checkpoint CRC-32 by model and rank (`actor/0`)."""


class Document(TypedDict):
    """Content of run.json; an attempt has `ATTEMPT` and what `run.machine.environment` returns."""

    attempts: list[dict[str, Any]]
    read: list[Entry]
    made: list[Entry]


EMPTY: Final = Document(attempts=[], read=[], made=[])
_DOCUMENT = TypeAdapter(Document)


def parsed(text: str | bytes) -> Document:
    """Return the content of a run.json. Raises ValueError if the file is damaged."""
    return _DOCUMENT.validate_json(text)


def as_text(document: Document) -> str:
    """Return a document as the text of run.json."""
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def with_files(entry: Entry, files: Mapping[str, str]) -> Entry:
    """Return the entry with the hashes of its files, by name, and their joint `sha256` if all files are hashed."""
    lines = "".join(f"{files[name]}  {name}\n" for name in sorted(files))
    joint = next(iter(files.values())) if len(files) == 1 else sha256(lines.encode()).hexdigest()
    whole = Entry(**{**entry, "files": dict(files)})
    return Entry(**{**whole, "sha256": joint}) if files and all(files.values()) else whole


class RunFile:
    """The run.json of a job's folder; several threads may add to it."""

    def __init__(self, folder: Path, require_ours: Callable[[], None]) -> None:
        """require_ours: raises an error if the folder belongs to a newer attempt."""
        self._path, self._lock, self._require_ours = folder / RUN, Lock(), require_ours

    def read(self) -> Document:
        return parsed(self._path.read_bytes())

    def change(self, *, read: Iterable[Entry] | None = None, made: Entry | None = None) -> Document:
        """Replace what the job read, or add what it made in place of an entry of this name and step."""
        with self._lock:
            self._require_ours()
            document = self.read()
            if read is not None:
                document["read"] = list(read)
            if made is not None:
                same = (made["name"], made.get("step"))
                others = [each for each in document["made"] if (each["name"], each.get("step")) != same]
                document["made"] = [*others, made][-MAX_ENTRIES:]
            replace(self._path, as_text(document))
            return document


def attempt_of(document: Document, step: int) -> dict[str, Any]:
    """Return the attempt that made a step; empty if the document does not know it."""
    return next((each for each in reversed(document["attempts"]) if int(each.get("after", 0)) < step), {})


def changed_files(before: Iterable[Entry], after: Iterable[Entry]) -> list[str]:
    """Return `field: file` of each file that changed, came or went; what has no hash on one side is left out."""
    known, found = ({each["name"]: each.get("files", {}) for each in entries} for entries in (before, after))
    both = [field for field in known if known[field] and found.get(field)]
    files = [(field, file) for field in both for file in sorted({*known[field], *found[field]})]
    pairs = {f"{field}: {file}": (known[field].get(file), found[field].get(file)) for field, file in files}
    return [name for name, (one, other) in pairs.items() if one != other and "" not in (one, other)]
