"""From a manifest to jobs and back."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlhf_api import kubectl_yaml
from rlhf_api.chain import in_order
from rlhf_api.job import Job
from rlhf_api.overrides import apply, name_of
from rlhf_api.problems import Problem, SpecError


def load(
    text_or_path: str | Path, overrides: Sequence[str] = (), finished: Mapping[str, str] = MappingProxyType({})
) -> list[Job]:
    """The jobs of a manifest, each after the jobs it reads.

    A Path is read; a str is the manifest itself, and its relative file:// URIs are relative to the working directory.
    `overrides` are the arguments of `--set`; `finished` jobs, name -> algorithm, may be read by `job://`
    too. Raises SpecError with every mistake.
    """
    if isinstance(text_or_path, Path):
        text, source, folder = _text(text_or_path), f"{text_or_path}: ", text_or_path.parent
    else:
        text, source, folder = text_or_path, "", Path()
    documents = apply(overrides, _mappings(kubectl_yaml.read(text, source), source))
    jobs, problems = [], []
    for number, document in enumerate(documents, start=1):
        try:
            jobs.append(Job.parse(document, folder))
        except SpecError as error:
            label = name_of(document) or f"document {number}"
            problems += [problem.within(f"{label}: ") for problem in error.problems]
    if problems:
        raise SpecError(problems)
    return in_order(jobs, finished)


def dump(job: Job) -> str:
    """The resolved job, defaults included, as YAML that `load` reads back."""
    return kubectl_yaml.write(job.model_dump(mode="json", by_alias=True))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError([Problem(str(path), f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError:
        raise SpecError([Problem(str(path), "cannot be read: it is not UTF-8 text")]) from None


def _mappings(documents: list[Any], source: str) -> list[dict[str, Any]]:
    found = [document for document in documents if document is not None]
    wrong = [number for number, document in enumerate(found, start=1) if not isinstance(document, dict)]
    if wrong:
        raise SpecError([Problem(f"{source}document {number}", "is not a mapping") for number in wrong])
    if not found:
        raise SpecError([Problem(f"{source}document 1", "is missing, the manifest is empty")])
    return found
