"""run.json of a job's folder: where each attempt ran, and what the job read and made, with hashes of all files.

Manifest, seeds and slots are beside it in job.yaml, the layout in mapping.json.
"""

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any, Final, Literal, Required

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from rlhf_api.chain import read_inputs
from rlhf_api.job import Job
from rlhf_api.status import Output, ReadInput
from rlhf_trainer.run_folder.attempt import replace

RUN = "run.json"
LABELS: Final = "rlhf.json"
"""File in a model's folder that says which job made the model from which inputs; it is not hashed."""
MAX_ENTRIES = 100
"""Number of the newest attempts, and of the newest outputs, that run.json keeps."""
ATTEMPT = ("attempt", "began", "after")
"""Facts of an attempt besides its environment; `after` is the step that it continued from, 0: the start."""
Kind = Literal["model", "data", "code", "checkpoint"]


class Entry(TypedDict, total=False):
    """Something that a job read or made: one file, or the files of a folder."""

    name: Required[str]
    """Field of the manifest, such as `spec.data.train`; for an output `model`, `data` or `checkpoint`."""
    kind: Required[Kind]
    uri: Required[str]
    revision: str
    """Commit of a model or data set of the hub, or of the user's code in git (`-dirty` if its files have changes)."""
    step: int
    """Step after which the output was made."""
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
_LOCK = Lock()
"""Lock held while run.json is changed, as a thread adds hashes to it."""


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


def change(file: Path, *, read: Iterable[Entry] | None = None, made: Entry | None = None) -> Document:
    """Replace the inputs in run.json, or add an output in place of an earlier one with the same name and step."""
    found = None if read is None else [*read]
    with _LOCK:
        document = parsed(file.read_bytes())
        if found is not None:
            document["read"] = found
        if made is not None:
            same = (made["name"], made.get("step"))
            others = [each for each in document["made"] if (each["name"], each.get("step")) != same]
            document["made"] = [*others, made][-MAX_ENTRIES:]
        replace(file, as_text(document))
    return document


def attempt_of(document: Document, step: int) -> dict[str, Any]:
    """Return the attempt that made a step; empty if the document does not know it."""
    return next((each for each in reversed(document["attempts"]) if int(each.get("after", 0)) < step), {})


def changed_files(before: Iterable[Entry], after: Iterable[Entry]) -> list[str]:
    """Return `field: file` of each file that changed, came or went; files that one side did not hash are left out."""
    known, found = ({each["name"]: each.get("files", {}) for each in entries} for entries in (before, after))
    both = [field for field in known if known[field] and found.get(field)]
    files = [(field, file) for field in both for file in sorted({*known[field], *found[field]})]
    pairs = {f"{field}: {file}": (known[field].get(file), found[field].get(file)) for field, file in files}
    return [name for name, (one, other) in pairs.items() if one != other and "" not in (one, other)]


def labelled(job: Job, folder: Path) -> tuple[tuple[ReadInput, ...], Output]:
    """Return (inputs of a job, its output in `folder`) by run.json beside it; write LABELS into a model's folder."""
    document = parsed((folder.parent / RUN).read_bytes())
    entries = {each["name"].removeprefix("spec."): each for each in document["read"]}
    made = next((each for each in document["made"] if each["name"] == folder.name), None)
    read = tuple(each.model_copy(update=_content(entries.get(each.name))) for each in read_inputs(job))
    digest = _content(made).get("digest")
    labels = {
        "job": job.name,
        "algorithm": job.spec.algorithm.name,
        "version": version("rlhf-operator"),
        "digest": digest,
        "inputs": [each.model_dump(mode="json", exclude_none=True) for each in read],
    }
    if folder.is_dir() and made and made["kind"] == "model":  # not in a data set, of which a later job reads all files
        (folder / LABELS).write_text(json.dumps(labels, indent=2) + "\n")
    return read, Output(uri=folder.resolve().as_uri(), digest=digest)


def _content(entry: Entry | None) -> dict[str, str]:
    """Return `digest` and `revision` of an input or output for the status, each if it is known."""
    digest = {"digest": f"sha256:{entry['sha256']}"} if entry and "sha256" in entry else {}
    return digest | ({"revision": entry["revision"]} if entry and "revision" in entry else {})
