"""What may change of a job that exists, in CEL: what `rlhf_api.resume` allows, and some of it only while suspended."""

from collections.abc import Iterator

from rlhf_api.crd.cel import Rule
from rlhf_api.crd.union import Schema
from rlhf_api.resume import LENGTHS, MAY_CHANGE

PAUSED = "self.suspend || oldSelf.suspend"
WHILE_SUSPENDED = "may change only while the job is suspended"
ANOTHER = "is not what it was when the job was made, and would make it another experiment; make a new job"
ROLES = ("actor", "critic", "reference", "reward", "cost")
TRAINED = ("actor", "critic", "reward", "cost")


def rules_of_changes(spec: Schema) -> Iterator[tuple[str, Rule]]:
    """(path, rule) of everything that a change of a spec with this schema may not do."""
    yield from _experiment(spec, "spec")
    yield "spec.checkpoint", Rule(_same("storage"), "cannot be moved; make a new job", "storage")
    yield from (("spec", rule) for rule in [*_paused(), *_lengths()])


def _experiment(schema: Schema, path: str) -> Iterator[tuple[str, Rule]]:
    """The rules that keep an object the same but for what may change."""
    needed = schema.get("required", [])
    for field, each in schema["properties"].items():
        below = f"{path}.{field}"
        if below in LENGTHS or _may_change(below):
            continue
        chosen = f"self.{field} == oldSelf.{field}"
        if _may_change_below(below):
            if field not in needed and "default" not in each:
                yield path, Rule(f"has(self.{field}) == has(oldSelf.{field})", ANOTHER, field)
            yield from _parts(each, below)
        elif field in needed or "default" in each:
            yield path, Rule(chosen, ANOTHER, field)
        else:
            yield path, Rule(_same(field), ANOTHER, field)


def _parts(schema: Schema, path: str) -> Iterator[tuple[str, Rule]]:
    if schema["type"] == "object":
        yield from _experiment(schema, path)
        return
    (key,) = schema["x-kubernetes-list-map-keys"]
    names = f"map(each, each.{key})"
    yield path, Rule(f"self.{names} == oldSelf.{names}", ANOTHER)
    yield from _experiment(schema["items"], f"{path}[]")


def _paused() -> Iterator[Rule]:
    fields = {name: f"self.{name} == oldSelf.{name}" for name in ("resources", "placement", "runtime")}
    fields |= {f"rollout.{name}": _same(f"rollout.{name}") for name in ("tensorParallel", "pipelineParallel")}
    fields |= {
        f"models.{role}": f"!has(self.models.{role}) || !has(oldSelf.models.{role}) || "
        f"{_same(f'models.{role}.parallelism')}"
        for role in ROLES
    }
    for field, same in fields.items():
        what = "parallelism " if field.startswith("models.") else ""
        yield Rule(f"{PAUSED} || {same}", what + WHILE_SUSPENDED, field)


def _same(field: str) -> str:
    """CEL: an optional field is in neither, or is the same in both."""
    return f"(has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field}))"


def _lengths() -> Iterator[Rule]:
    """The length may change where no learning rate depends on it."""
    cosine = " || ".join(
        f"has(self.models.{role}) && has(self.models.{role}.optimizer) && "
        f"self.models.{role}.optimizer.schedule == 'Cosine'"
        for role in TRAINED
    )
    for path in LENGTHS:
        field = path.removeprefix("spec.training.")
        yield Rule(
            f"{_same(f'training.{field}')} || !({cosine})",
            "cannot change, since a Cosine schedule depends on it; make a new job",
            "training",
        )


def _pattern(path: str) -> list[str]:
    return path.replace("[]", ".*").split(".")


def _fits(one: list[str], other: list[str]) -> bool:
    """Whether the beginnings of two paths are the same, as far as both go."""
    return all(a == b or "*" in (a, b) for a, b in zip(one, other, strict=False))


def _may_change(path: str) -> bool:
    here = _pattern(path)
    return any(len(_pattern(each)) <= len(here) and _fits(_pattern(each), here) for each in MAY_CHANGE)


def _may_change_below(path: str) -> bool:
    here = _pattern(path)
    return any(len(_pattern(each)) > len(here) and _fits(_pattern(each), here) for each in MAY_CHANGE)
