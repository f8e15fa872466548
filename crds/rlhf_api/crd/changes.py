"""CEL about updates of a job: what `rlhf_api.resume` allows may change, some of it only while the job is suspended."""

from collections.abc import Iterator

from rlhf_api.crd.union import Schema
from rlhf_api.expressions import validation
from rlhf_api.resume import LENGTHS, MAY_CHANGE, alike, may_change
from rlhf_api.rules import ROLES

PAUSED = "self.suspend || oldSelf.suspend"
WHILE_SUSPENDED = "may change only while the job is suspended"
ANOTHER = "is not what it was when the job was made, and would make it another experiment; make a new job"


def rules_of_changes(spec: Schema) -> Iterator[tuple[str, dict[str, str]]]:
    """(path, validation) for everything that an update may not change in a spec of this schema."""
    yield from _experiment(spec, "spec")
    yield "spec.checkpoint", validation(_same("storage"), "cannot be moved; make a new job", "storage")
    yield from (("spec", rule) for rule in [*_paused(), *_lengths()])


def _experiment(schema: Schema, path: str) -> Iterator[tuple[str, dict[str, str]]]:
    """One validation for each field of an object that may not change, also of the objects in it."""
    needed = schema.get("required", [])
    for field, each in schema["properties"].items():
        below = f"{path}.{field}"
        pattern = below.replace("[]", ".*")
        if below in LENGTHS or may_change(pattern):
            continue
        chosen = f"self.{field} == oldSelf.{field}"
        if any(alike(pattern, each) for each in MAY_CHANGE):
            if field not in needed and "default" not in each:
                yield path, validation(f"has(self.{field}) == has(oldSelf.{field})", ANOTHER, field)
            yield from _parts(each, below)
        elif field in needed or "default" in each:
            yield path, validation(chosen, ANOTHER, field)
        else:
            yield path, validation(_same(field), ANOTHER, field)


def _parts(schema: Schema, path: str) -> Iterator[tuple[str, dict[str, str]]]:
    if schema["type"] == "object":
        yield from _experiment(schema, path)
        return
    (key,) = schema["x-kubernetes-list-map-keys"]
    names = f"map(each, each.{key})"
    yield path, validation(f"self.{names} == oldSelf.{names}", ANOTHER)
    yield from _experiment(schema["items"], f"{path}[]")


def _paused() -> Iterator[dict[str, str]]:
    fields = {name: f"self.{name} == oldSelf.{name}" for name in ("resources", "placement", "runtime")}
    fields |= {f"rollout.{name}": _same(f"rollout.{name}") for name in ("tensorParallel", "pipelineParallel")}
    fields |= {
        f"models.{role}": f"!has(self.models.{role}) || !has(oldSelf.models.{role}) || "
        f"{_same(f'models.{role}.parallelism')}"
        for role in ROLES
    }
    for field, same in fields.items():
        what = "parallelism " if field.startswith("models.") else ""
        yield validation(f"{PAUSED} || {same}", what + WHILE_SUSPENDED, field)


def _same(field: str) -> str:
    """CEL: an optional field is in neither, or is the same in both."""
    return f"(has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field}))"


def _lengths() -> Iterator[dict[str, str]]:
    """The length may change where no learning rate depends on it."""
    cosine = " || ".join(
        f"has(self.models.{role}) && has(self.models.{role}.optimizer) && "
        f"self.models.{role}.optimizer.schedule == 'Cosine'"
        for role in ROLES
    )
    for path in LENGTHS:
        field = path.removeprefix("spec.training.")
        yield validation(
            f"{_same(f'training.{field}')} || !({cosine})",
            "cannot change, since a Cosine schedule depends on it; make a new job",
            "training",
        )
