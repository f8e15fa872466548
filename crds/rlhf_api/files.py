"""Reader and writer of manifests, which hold jobs; `--set [NAME:]path=value` changes documents before the check."""

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlhf_api import kubectl_yaml
from rlhf_api.chain import in_order, inputs_of
from rlhf_api.checks.resume import leaves
from rlhf_api.job import Job
from rlhf_api.own_code import OwnCodeError
from rlhf_api.problems import Problem, SpecError, suggestion
from rlhf_api.spec.algorithms import CUSTOM


def load(
    text_or_path: str | Path, overrides: Sequence[str] = (), finished: Mapping[str, str] = MappingProxyType({})
) -> list[Job]:
    """Return the jobs of a manifest, each after the jobs whose output it reads.

    A Path is read; a str is the manifest itself, and its relative file:// URIs are relative to the working directory.
    `overrides` are the arguments of `--set`. `finished`: name -> algorithm of jobs whose output may be read, too.
    Raises SpecError with every mistake, or OwnCodeError for a user's algorithm class that does not work.
    """
    jobs, problems = read(text_or_path, overrides, finished)
    if problems:
        raise SpecError(problems)
    return jobs


def read(
    text_or_path: str | Path, overrides: Sequence[str] = (), finished: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[Job], list[Problem]]:
    """Return the jobs of a manifest that can be tried, some without their wrong fields, and every mistake; see `load`.

    A job that reads the output of another that cannot be tried is left out, too.
    """
    if isinstance(text_or_path, Path):
        text, source, folder = read_text(text_or_path), f"{text_or_path}: ", text_or_path.parent
    else:
        text, source, folder = text_or_path, "", Path()
    documents = apply(overrides, _mappings(kubectl_yaml.read(text, source), source))
    jobs, problems, lost = list[Job](), list[Problem](), set[str]()
    for number, document in enumerate(documents, start=1):
        label = _name_of(document) or f"document {number}"
        try:
            jobs.append(Job.parse(document, folder))
        except SpecError as error:
            rest, further = _without_mistakes(document, error, folder)
            problems += [problem.within(f"{label}: ") for problem in [*error.problems, *further]]
            jobs += rest
            lost.update([label] * (not rest))
        except OwnCodeError as error:
            raise OwnCodeError(f"{label}: {error}") from error
    try:
        ordered = in_order(jobs, {**finished, **dict.fromkeys(lost, CUSTOM)})  # a custom job's output fits anywhere
    except SpecError as error:
        return [], [*problems, *(error.problems if all(map(_name_of, documents)) else [])]
    for job in ordered:
        lost.update([job.name] * bool(inputs_of(job) & lost))
    return [job for job in ordered if job.name not in lost], problems


def _without_mistakes(document: Any, error: SpecError, folder: Path) -> tuple[list[Job], list[Problem]]:
    """Return ([the job without the document's wrong fields], [problems found only then]); no job if none is valid.

    Rules are checked once all fields are right. A problem that may follow from a removed field is left out.
    """
    rest = _without_fields(document, [problem.path for problem in error.problems])
    try:
        return [Job.parse(rest, folder)], []
    except OwnCodeError:
        return [], []
    except SpecError as found:
        new = [each for each in found.problems if not any(_may_follow(each, known) for known in error.problems)]
        goes_on = new and rest != document  # a default may break a rule, and cannot be removed
        return _without_mistakes(rest, SpecError(new), folder)[0] if goes_on else [], new


def _without_fields(document: Any, paths: Iterable[str]) -> Any:
    """Return a copy of a document without these fields."""
    rest = deepcopy(document)
    for path in paths:
        node, (*above, last) = rest, path.split(".")
        with suppress(LookupError, TypeError, ValueError):  # the field is missing, or an entry of a list
            for part in above:
                node = node[int(part)] if isinstance(node, list) else node[part]
            del node[last]
    return rest


def _may_follow(new: Problem, known: Problem) -> bool:
    """Whether a new problem may result from the removal of the field of a known problem."""
    names = {known.path.rpartition(".")[2], *re.findall(r"[a-z]+[A-Z]\w+", known.message)}
    follows = new.message.startswith("is missing") or known.path.startswith(new.path)
    return follows or any(each in str(new) for each in names)


def document_of(job: Job) -> dict[str, Any]:
    """Return the resolved job, defaults included, as the document that `dump` writes."""
    return job.model_dump(mode="json", by_alias=True)


def dump(job: Job) -> str:
    """Return the resolved job, defaults included, as YAML that `load` reads back."""
    return kubectl_yaml.write(document_of(job))


def strings_in(document: object) -> list[tuple[str, str]]:
    """Return (path, text) of each string in a part of a manifest; the arguments of functions are left out."""
    found = [(path, value) for path, value in leaves(document) if isinstance(value, str)]
    return [(path, text) for path, text in found if "arguments" not in path.split(".")]


def read_text(file: Path, path: str = "") -> str:
    """Return the text of a file. Raises SpecError, with `path` or else the file's, if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError([Problem(path or str(file), f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError:
        raise SpecError([Problem(path or str(file), "cannot be read: it is not UTF-8 text")]) from None


def _mappings(documents: list[Any], source: str) -> list[dict[str, Any]]:
    found = [document for document in documents if document is not None]
    wrong = [number for number, document in enumerate(found, start=1) if not isinstance(document, dict)]
    if wrong:
        raise SpecError([Problem(f"{source}document {number}", "is not a mapping") for number in wrong])
    if not found:
        raise SpecError([Problem(source.removesuffix(": ") or "the text", "holds no RLHFJob, it is empty")])
    return found


def apply(texts: Sequence[str], documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the documents with the overrides `[NAME:]path=value` applied in order; the given documents do not change.

    An override applies where its path can exist; an override that applies nowhere is an error.
    """
    for label, name, path, value in [_override(text) for text in texts]:
        names = [_name_of(document) for document in documents]
        if name and name not in names:
            known = suggestion(name, filter(None, names))
            raise SpecError([Problem(label, f'no job is named "{name}"; {known}')])
        before, documents = documents, [*documents]
        for place in (place for place, own_name in enumerate(names) if name in ("", own_name)):
            with suppress(LookupError):
                documents[place] = _replaced(before[place], path, value)
        if all(map(operator.is_, documents, before)):
            raise SpecError([Problem(label, "there is no such path")])
    return documents


def _override(text: str) -> tuple[str, str, tuple[str, ...], Any]:
    """Return `--set` text as (label in messages, job's name or empty for all, path, value). Raises SpecError."""
    label = f"--set {text}"
    target, equals, value = text.partition("=")
    name, _, path = target.rpartition(":")
    parts = tuple(path.split("."))
    if not equals or not all(parts):
        raise SpecError([Problem(label, "expected path=value or NAME:path=value")])
    prefix = () if parts[0] in ("apiVersion", "kind", "metadata", "spec") else ("spec",)
    return label, name, prefix + parts, kubectl_yaml.read_one(value, f"{label}: ")


def _name_of(document: dict[str, Any]) -> str:
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


def _replaced(node: Any, path: tuple[str, ...], value: Any) -> Any:
    """Return a document's `node` with `value` at `path`; LookupError if a part of the path cannot exist.

    Changed parts are copied, because YAML aliases share nodes.
    """
    if not path:
        return value
    part, rest = path[0], path[1:]
    if isinstance(node, dict) or (node is None and not part.isdecimal()):
        fields = node or {}
        return {**fields, part: _replaced(fields.get(part), rest, value)}
    if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
        index = int(part)
        return [*node[:index], _replaced(node[index], rest, value), *node[index + 1 :]]
    raise LookupError(part)
