"""Files that a job reads (models, data, templates, own code), and their hashes for run.json.

Code and texts are hashed before the start, as `spec.watch.changedCode` compares them, and the rest by a thread during
the run. Large files in the cache of the Hugging Face Hub are named by their SHA-256 and need no reading.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import file_digest
from pathlib import Path
from threading import Thread, get_native_id

from rlhf_api.chain import SCHEME, read_inputs
from rlhf_api.checks.resume import leaves
from rlhf_api.contract import ENTRYPOINT
from rlhf_api.files import document_of
from rlhf_api.job import Job
from rlhf_trainer.data.lines import files_of
from rlhf_trainer.data.uri import local_path
from rlhf_trainer.errors import DataError, EnvironmentProblem
from rlhf_trainer.hub import HUB, cached_folder
from rlhf_trainer.run_folder.evidence import LABELS, RUN, Entry, Kind, with_files
from rlhf_trainer.run_folder.folder import JobFolder, writing

TEXT_FILES = (".jinja", ".json", ".model", ".py", ".txt")
"""Endings of the files in a model's folder from which tokens, templates, end tokens and the model's code are read."""
NICE = 10
"""Priority of the thread that hashes: below that of training."""
BLOBS, HASH = "blobs", re.compile("[0-9a-f]{64}")
"""Folder with the files in the hub's cache, and pattern of a large file's name there, which is its SHA-256."""
Source = tuple[Entry, dict[str, Path]]
"""Entry of a field without hashes, and the field's files by name; empty if the files are not on this machine."""


def sources_of(job: Job, output: Path) -> Iterator[Source]:
    """Yield the inputs of a job; output: the run folder, with the outputs of other jobs that an input may name."""
    inputs = [(each.name, each.uri, each.revision) for each in read_inputs(job)]
    template = job.spec.data.chat_template
    for field, uri, revision in (*inputs, *[("data.chatTemplate", template, None)] * ("://" in template)):
        is_data = field.startswith(("data.", "evaluation."))
        kind: Kind = "code" if field == "data.chatTemplate" else "data" if is_data else "model"
        entry = Entry(name=f"spec.{field}", kind=kind, uri=uri)
        place: Path | None = None
        if uri.startswith(SCHEME):
            place = output / uri.removeprefix(SCHEME) / kind
        elif uri.startswith(HUB):
            place = cached_folder(uri, "dataset" if is_data else "model", revision)
            if place:
                entry["revision"] = place.name
        else:
            with suppress(DataError):
                place = local_path(uri)
        yield entry, files_below(place, kind) if place else {}
    yield from _own_code(job)


def files_below(place: Path, kind: Kind) -> dict[str, Path]:
    """Return the files at a path, without LABELS, by their names in the folder; a model's subfolders are left out.

    A byte of a name that is not UTF-8 is written as `\\xff`.
    """
    folder = place if place.is_dir() else place.parent
    found = sorted(place.glob("*")) if kind == "model" and place.is_dir() else files_of(place)
    files = {file.relative_to(folder).as_posix(): file for file in found if file.is_file() and file.name != LABELS}
    return {os.fsencode(name).decode(errors="backslashreplace"): file for name, file in files.items()}


def _own_code(job: Job) -> Iterator[Source]:
    """Yield the user's modules that the fields of a job name."""
    modules = [(field, value) for field, value in leaves(document_of(job)) if re.fullmatch(ENTRYPOINT, str(value))]
    if job.spec.algorithm.is_own:
        modules.append(("spec.algorithm.entrypoint", type(job.spec.algorithm).__module__))
    for field, value in modules:
        folder, files = _module_files(value.partition(":")[0])
        if files:
            named = {file.relative_to(folder).as_posix(): file for file in files}
            yield Entry(name=field, kind="code", uri=folder.resolve().as_uri()), named


def _module_files(module: str) -> tuple[Path, list[Path]]:
    """Return (folder of `sys.path` with a module, the module's file and the siblings that it mentions, recursively)."""
    for folder in map(Path, sys.path):
        named = [folder / f"{module.replace('.', '/')}{end}" for end in (".py", "/__init__.py")]
        for file in filter(Path.is_file, named):
            beside, found = {other.stem: other for other in file.parent.glob("*.py")}, [file]
            for each in found:
                words = set(re.findall(r"\w+", each.read_text(encoding="utf-8", errors="replace")))
                found += [other for name, other in beside.items() if name in words and other not in found]
            return folder, sorted(found)
    return Path(), []


def editable_inputs(job: Job, output: Path) -> list[Entry]:
    """Return the inputs that the user may edit between two attempts; only code and TEXT_FILES have hashes."""
    found = []
    for entry, files in sources_of(job, output):
        if entry["kind"] != "data" and not entry["uri"].startswith((SCHEME, HUB)):
            texts = {name for name, file in files.items() if entry["kind"] == "code" or file.suffix in TEXT_FILES}
            found.append(with_files(entry, {name: hash_file(files[name]) if name in texts else "" for name in files}))
    return found


def hashed(source: Source) -> Entry:
    """Return the entry of a source with its hashes, and the commit of own code."""
    entry, files = source
    if entry["kind"] == "code" and files and (commit := _commit([*files.values()])):
        entry["revision"] = commit
    return with_files(entry, {name: hash_file(file) for name, file in files.items()})


def _commit(files: Sequence[Path]) -> str:
    """Return the git commit of files of one folder, with `-dirty` if any is not as committed; empty outside git."""
    git = partial(subprocess.check_output, cwd=files[0].parent, stderr=subprocess.DEVNULL, text=True)
    try:
        commit = git(["git", "rev-parse", "HEAD"])
        changes = git(["git", "status", "--porcelain", "--ignored", "--", *files])
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.strip() + "-dirty" * bool(changes)


def hash_file(file: Path) -> str:
    """Return the SHA-256 of a file; empty if the file cannot be read."""
    if (place := file.resolve()).parent.name == BLOBS and HASH.fullmatch(place.name):
        return place.name
    with suppress(OSError), file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()
    return ""


def begin_hashing(job: Job, folder: JobFolder) -> Callable[[int], None]:
    """Start a thread that adds the hashes of a job's inputs to run.json, and return a function of the job's last step.

    The function waits for the thread, adds the hashes of the output, and names entries without a hash in events.log.
    """

    def work() -> None:
        with suppress(OSError):  # the machine may forbid a lower priority
            os.setpriority(os.PRIO_PROCESS, get_native_id(), NICE)
        with suppress(EnvironmentProblem, OSError):  # the run itself meets this error, too
            folder.add_evidence(read=map(hashed, sources_of(job, folder.path.parent)))

    def end(step: int) -> None:
        thread.join()
        kind: Kind = "data" if folder.made.name == "data" else "model"
        made = Entry(name=folder.made.name, kind=kind, uri=folder.made.resolve().as_uri(), step=step)
        with writing(folder.path):
            document = folder.add_evidence(made=hashed((made, files_below(folder.made, kind))))
        if without := [each["name"] for each in (*document["read"], *document["made"]) if "sha256" not in each]:
            folder.event(f"{RUN} lacks hashes of files of {', '.join(without)}, which are not on this machine")

    thread = Thread(target=work, daemon=True)
    thread.start()
    return end
