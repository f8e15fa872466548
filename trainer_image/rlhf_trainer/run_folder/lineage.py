"""Lineage of a job with digests of files: entries of the status, and rlhf.json in the output."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from rlhf_api.chain import SCHEME, read_inputs
from rlhf_api.job import Job
from rlhf_api.status import ReadInput
from rlhf_trainer.data.uri import local_path
from rlhf_trainer.errors import DataError
from rlhf_trainer.hub import HUB

LABELS: Final = "rlhf.json"
"""File in a job's output that says what made it."""
WHOLE_BYTES, BLOCKS, BLOCK_BYTES = 2**20, 8, 2**16
"""Largest file that is read whole for its digest; of a larger one so many blocks are read, evenly spaced."""


def recorded_inputs(job: Job, output: Path) -> tuple[ReadInput, ...]:
    """Return what a job reads, with digests of what lies on this machine, and commits of what the hub gave.

    output: run folder. What is not there yet, or cannot be read, has no digest.
    """
    return tuple(each.model_copy(update=_content(each, output)) for each in read_inputs(job))


def write_labels(job: Job, folder: Path, inputs: Sequence[ReadInput]) -> str:
    """Write `LABELS` into a job's output, and return the digest of the other files there."""
    digest = digest_of(folder)
    labels = {
        "job": job.name,
        "algorithm": job.spec.algorithm.name,
        "version": version("rlhf-operator"),
        "digest": digest,
        "inputs": [each.model_dump(mode="json", exclude_none=True) for each in inputs],
    }
    (folder / LABELS).write_text(json.dumps(labels, indent=2) + "\n")
    return digest


def digest_of(path: Path) -> str:
    """Return `sha256:HEX` of a file or folder; `sampled:HEX` if a file is larger than WHOLE_BYTES.

    That of a file which is read whole is what sha256sum prints. A folder's is the SHA-256 of a line `digest name` for
    each file, sorted by name; LABELS and hidden files do not count. Raises OSError.
    """
    if path.is_file():
        return _file_digest(path)
    inside = ((file.relative_to(path), file) for file in path.rglob("*") if file.is_file())
    files = sorted((str(name), file) for name, file in inside if name.parts[-1] != LABELS and name.parts[0][0] != ".")
    digests = [(name, _file_digest(file)) for name, file in files]
    kind = "sampled" if any(digest.startswith("sampled") for _, digest in digests) else "sha256"
    lines = "".join(f"{digest} {name}\n" for name, digest in digests)
    return f"{kind}:{hashlib.sha256(lines.encode(errors='surrogateescape')).hexdigest()}"


def _file_digest(file: Path) -> str:
    size = file.stat().st_size
    if size <= WHOLE_BYTES:
        return f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    found = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        for block in range(BLOCKS):
            opened.seek(block * (size - BLOCK_BYTES) // (BLOCKS - 1))
            found.update(opened.read(BLOCK_BYTES))
    return f"sampled:{found.hexdigest()}"


def _content(read: ReadInput, output: Path) -> dict[str, Any]:
    """Return the fields of an input that say what its content is; empty if that is not known."""
    with suppress(DataError, OSError):
        if read.uri.startswith(HUB):
            return {"revision": _commit(read)}
        if read.uri.startswith(SCHEME):
            made = (output / read.uri.removeprefix(SCHEME) / kind for kind in ("model", "data"))
            return {"digest": digest_of(next((folder for folder in made if folder.is_dir()), output / "none"))}
        return {"digest": digest_of(local_path(read.uri))}
    return {}


def _commit(read: ReadInput) -> str | None:
    """Return the commit that the hub's cache of this machine has for a model or a data set. OSError without one."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    kind = "dataset" if read.name.startswith(("data", "evaluation")) else "model"
    cached = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=read.uri.removeprefix(HUB), repo_type=kind))
    return (cached / "refs" / (read.revision or "main")).read_text().strip()
