"""Lineage of a job: what it read and made with digests, for the status, and in rlhf.json beside the output's files."""

import json
from importlib.metadata import version
from pathlib import Path

from rlhf_api.chain import read_inputs
from rlhf_api.job import Job
from rlhf_api.status import Output, ReadInput
from rlhf_trainer.run_folder.evidence import LABELS, Document, Entry


def labelled(job: Job, folder: Path, document: Document) -> tuple[tuple[ReadInput, ...], Output]:
    """Return what a job read, and its output in `folder`, into which LABELS is written.

    document: the job's run.json, with hashes and the hub's commits.
    """
    entries = {each["name"].removeprefix("spec."): each for each in document["read"]}
    read = tuple(_with_content(each, entries.get(each.name)) for each in read_inputs(job))
    digest = next((_digest(each) for each in document["made"] if each["name"] == folder.name), None)
    labels = {
        "job": job.name,
        "algorithm": job.spec.algorithm.name,
        "version": version("rlhf-operator"),
        "digest": digest,
        "inputs": [each.model_dump(mode="json", exclude_none=True) for each in read],
    }
    if folder.is_dir():
        (folder / LABELS).write_text(json.dumps(labels, indent=2) + "\n")
    return read, Output(uri=folder.resolve().as_uri(), digest=digest)


def _with_content(read: ReadInput, entry: Entry | None) -> ReadInput:
    """Return an input with its digest, and the commit that the hub's cache has."""
    if entry is None:
        return read
    return read.model_copy(update={"digest": _digest(entry), "revision": entry.get("revision", read.revision)})


def _digest(entry: Entry) -> str | None:
    return f"sha256:{entry['sha256']}" if "sha256" in entry else None
