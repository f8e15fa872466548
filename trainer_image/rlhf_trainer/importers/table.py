"""What a key of another project becomes here, and the manifest that a table of such keys makes of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rlhf_api.names import API_VERSION, KIND

SCHEDULES = {"constant": "Constant", "constant_with_warmup": "Constant", "cosine": "Cosine"}
"""Names of transformers' schedules; those of other names that end at a part of the peak are Cosine here, too."""
FILES = (".parquet", ".json", ".jsonl", ".csv", ".arrow")


class NoCounterpartError(Exception):
    """A value that nothing here stands for; the text says why."""


class OffError(NoCounterpartError):
    """A value that turns something off which is off here where nothing is said."""


@dataclass(frozen=True)
class To:
    """The value goes to the field `path` below spec, as `change` makes it; only these algorithms have the field."""

    path: str
    change: Callable[[Any], Any] = lambda value: value
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Read:
    """Goes to `path` together with other keys, by the project's `combine`."""

    path: str


@dataclass(frozen=True)
class NotNeeded:
    """Nothing here has to say it; `why`."""

    why: str


@dataclass(frozen=True)
class Lost:
    """Nothing here can say it, and training differs without it; `why`."""

    why: str


Table = Mapping[str, To | Read | NotNeeded | Lost]


@dataclass
class Draft:
    """A manifest in the making, and what became of each key that was given."""

    name: str = "imported"
    spec: dict[str, Any] = field(default_factory=dict)
    mapped: dict[str, str] = field(default_factory=dict)
    not_needed: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        return str(self.spec["algorithm"]["name"])

    def put(self, path: str, value: Any) -> None:
        """Set a field below spec."""
        *above, last = path.split(".")
        place = self.spec
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value

    def get(self, path: str) -> Any:
        """A field below spec, or None."""
        place: Any = self.spec
        for part in path.split("."):
            place = place.get(part, {}) if isinstance(place, dict) else {}
        return None if place == {} else place

    def document(self) -> dict[str, Any]:
        """The manifest."""
        order = (
            "algorithm",
            "models",
            "data",
            "rollout",
            "training",
            "evaluation",
            "outputs",
            "checkpoint",
            "resources",
        )
        spec = {part: self.spec[part] for part in order if part in self.spec}
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": self.name}, "spec": spec}


def fill(draft: Draft, table: Table, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Put each key where the table says; defaults of the project stand behind what is given, and are not told of."""
    for key, value in {**defaults, **given}.items():
        entry = _entry(table, key)
        where = Draft() if key not in given else draft
        if entry is None:
            where.unknown.append(key)
        elif isinstance(entry, Lost) and value not in (None, False, 0, "", [], {}):
            where.lost[key] = entry.why
        elif isinstance(entry, Lost):
            where.not_needed[key] = "is off there, as here"
        elif isinstance(entry, NotNeeded):
            where.not_needed[key] = entry.why
        elif value is None:
            where.not_needed[key] = "is null, as if it were not there"
        elif isinstance(entry, Read):
            where.mapped[key] = entry.path
        else:
            _put(draft, where, key, value, entry)


def _put(draft: Draft, where: Draft, key: str, value: Any, entry: To) -> None:
    if entry.only and draft.algorithm not in entry.only:
        where.not_needed[key] = f"{draft.algorithm} has no such option"
        return
    try:
        draft.put(entry.path, entry.change(value))
    except OffError as why:
        where.not_needed[key] = str(why)
    except NoCounterpartError as why:
        where.lost[key] = str(why)
    except (TypeError, ValueError):
        where.lost[key] = f"{value!r} is not what spec.{entry.path} takes"
    else:
        where.mapped[key] = entry.path


def _entry(table: Table, key: str) -> To | Read | NotNeeded | Lost | None:
    """The entry of a key, or of the first pattern that it fits."""
    patterns = (pattern for pattern in table if "*" in pattern and fnmatchcase(key, pattern))
    return table.get(key) or next((table[pattern] for pattern in patterns), None)


def all_of(keys: Iterable[str], entry: To | Read | NotNeeded | Lost) -> dict[str, To | Read | NotNeeded | Lost]:
    """A table in which all these keys have one entry."""
    return dict.fromkeys(keys, entry)


def one_of(choices: Mapping[Any, str]) -> Callable[[Any], str]:
    """A change that takes one of several values to ours."""

    def change(value: Any) -> str:
        if value not in choices:
            raise NoCounterpartError(f"there is no {value} here; expected one of {', '.join(map(str, choices))}")
        return choices[value]

    return change


def schedule(value: Any) -> str:
    """Constant, or a schedule that falls: Cosine."""
    name = str(value).lower()
    if name in SCHEDULES or name.startswith("cosine"):
        return SCHEDULES.get(name, "Cosine")
    raise NoCounterpartError(f"there is no {value} here, but Constant and Cosine, which ends at a tenth of the peak")


def above_zero(value: Any) -> int:
    """A number of steps or rows; 0 and less mean never, or all."""
    if float(value) <= 0:
        raise OffError(f"{value} is none, or all; here nothing says so")
    return int(value)


def flag(value: Any) -> bool:
    """Whether a switch is on."""
    return value in (True, "true", "True", "1", 1)


def uri_of(place: Any) -> str:
    """`org/name` is on the hub; what looks like a path is a file."""
    text = str(place)
    if "://" in text:
        return text
    is_path = text.startswith(("/", "./", "../", "~", "$")) or text.endswith(FILES) or text.count("/") != 1
    return f"file://{Path(text).expanduser()}" if is_path else f"hf://{text}"


def dns_label(name: Any) -> str:
    """A name that a job may have: lower-case letters, digits and dashes, a letter first, 40 at most."""
    kept = "".join(each if each.isascii() and each.isalnum() else "-" for each in str(name).lower())
    return kept.strip("-0123456789")[:40].rstrip("-") or "imported"


def warmup(draft: Draft, role: str, key: str, ratio: Any, steps: int | None) -> None:
    """Warm-up as a share of the steps, where their number is known."""
    if not ratio:
        return
    if steps:
        draft.put(f"models.{role}.optimizer.warmupSteps", round(float(ratio) * steps))
    else:
        sentence = f"{key} is a share of the steps, whose number is not said: set models.{role}.optimizer.warmupSteps"
        draft.checks.append(sentence)
