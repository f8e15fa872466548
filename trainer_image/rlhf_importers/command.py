"""`rlhf import`: conversion of another project's configuration into a manifest with the outcome of each key."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf_api.files import read_text
from rlhf_api.job import Job
from rlhf_api.kubectl_yaml import write
from rlhf_api.problems import Problem, SpecError, one_line, printable
from rlhf_importers import openrlhf, trl, verl
from rlhf_importers.scalars import UNKNOWN
from rlhf_importers.several_keys import as_list
from rlhf_importers.table import Draft, NoCounterpartError, Values, fill, table

PROJECTS = {"verl": verl, "openrlhf": openrlhf, "trl": trl}
"""Project that `--from` names -> its module, with `read`, `algorithm`, `CHANGES` and `combine`."""


def convert(text: str, project: str, *, source: str, algorithm: str | None = None) -> Draft:
    """Convert the text of another project's configuration to a draft manifest. Raises SpecError."""
    its, values = PROJECTS[project], Values()
    try:
        found, notes = its.read(text, source)
        texts = {key: " ".join(map(str, as_list(value))) for key, value in found.items()}
        unsaid = {key: text.replace(UNKNOWN, "") for key, text in texts.items() if UNKNOWN in text}
        given = values = Values({key: value for key, value in found.items() if key not in unsaid})
        if not given:
            raise NoCounterpartError(f"no key of {project} is reached where it is followed")
        draft = Draft(spec={"algorithm": its.algorithm(given, algorithm)}, checks=notes)
        values = fill(draft, table(project, draft.algorithm, **its.CHANGES), given)
        its.combine(draft, values)
        draft.lost |= {key: f"only a run of the script knows its value, {text}" for key, text in unsaid.items()}
    except NoCounterpartError as why:
        raise SpecError([Problem(source, str(why))]) from None
    except SpecError:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError):
        found = one_line(repr(values[values.last]), most=60)
        raise SpecError([Problem(f"{source}: {values.last}", f"{found} is not what {project} takes")]) from None
    return draft


def manifest_text(draft: Draft, source: str, project: str) -> str:
    """Return the YAML of a draft manifest, below comments with the outcome of each key of the configuration."""
    lines = [f"Imported from {source} ({project}) by `rlhf import`; it is a draft: read it before it runs."]
    parts: tuple[tuple[str, Mapping[str, str]], ...] = (
        ("Check:", dict.fromkeys(draft.checks, "")),
        ("No counterpart here, and training differs without it:", draft.lost),
        ("Unknown, and nowhere in this manifest:", dict.fromkeys(draft.unknown, "")),
        ("Not needed here:", draft.not_needed),
        ("Mapped:", {key: f"spec.{path}" for key, path in draft.mapped.items()}),
    )
    for title, entries in parts:
        if entries:
            lines += ["", title, *(f"- {key}: {why}" if why else f"- {key}" for key, why in entries.items())]
    comments = (f"# {printable(line)}".rstrip() for line in lines)
    return "\n".join([*comments, write(draft.document()).rstrip() + "\n"])


def import_file(file: Path, project: str, *, output: Path | None, algorithm: str | None) -> Iterator[tuple[str, bool]]:
    """Write the manifest made from `file` to `output`, or yield (manifest, True); then yield notes as (text, False).

    Raises SpecError if `file` cannot be read, or, after the manifest was written, if the manifest is not valid.
    """
    text = read_text(file)
    if project not in PROJECTS:
        raise SpecError([Problem("--from", f"there is no {project}; expected {', '.join(PROJECTS)}")])
    draft = convert(text, project, source=str(file), algorithm=algorithm)
    manifest = manifest_text(draft, file.name, project)
    if output:
        try:
            output.write_text(manifest)
        except OSError as error:
            raise SpecError([Problem(str(output), f"cannot be written: {error.strerror}")]) from None
    else:
        yield manifest, True
    yield from ((f"check: {each}", False) for each in draft.checks)
    yield from ((f"no counterpart: {key}: {why}", False) for key, why in draft.lost.items())
    yield from ((f"unknown: {key}", False) for key in draft.unknown)
    mapped, not_needed, lost, unknown = map(len, (draft.mapped, draft.not_needed, draft.lost, draft.unknown))
    yield f"{mapped} keys mapped, {not_needed} not needed, {lost} without counterpart, {unknown} unknown", False
    try:
        Job.parse(draft.document())
    except SpecError as error:
        raise SpecError(each.within("the manifest is not valid yet: ") for each in error.problems) from None
