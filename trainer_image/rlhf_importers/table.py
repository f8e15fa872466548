"""Table of another project's keys, and the conversion of a configuration by it. `keys/*.txt` say what a row is.

A field that the algorithm lacks is left out.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic.alias_generators import to_camel

from rlhf_api.names import API_VERSION, KIND, Role
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.rollout import Rollout
from rlhf_api.tables import read_table
from rlhf_importers.scalars import scalar

ROW = re.compile(r"(?P<keys>\S.*?) +(?P<outcome>to|with|sampling|skip|lost) +(?P<text>.*)")
SECTIONS = ("algorithm", "models", "data", "rollout", "training", "evaluation", "outputs", "checkpoint", "resources")
FILES = (".parquet", ".json", ".jsonl", ".csv", ".arrow")
OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
OPTION_VALUES = read_table(__package__, "option_values.yaml", dict[str, dict[str, dict[str, Any]]])
"""Values of other projects' options: project -> table -> value there -> value in a manifest."""


class NoCounterpartError(Exception):
    """Error for a value of another project that has no counterpart here; the text says why."""


class OffError(NoCounterpartError):
    """Error for a value that turns off an option which is off here by default, so that nothing is lost."""


Change = Callable[[Any], Any]
Row = tuple[str, str]
"""Row of a table of keys: OUTCOME and TEXT."""


@dataclass(frozen=True)
class Table:
    """Parsed table of another project's keys: rows by key or pattern, new names by older ones, defaults unlike ours."""

    changes: Mapping[str, Change]
    """Functions that convert a value, by name; a row of the table names its function in brackets."""
    rows: dict[str, Row] = field(default_factory=dict)
    newer: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)

    def row(self, key: str) -> Row | None:
        """Return the table's row of a key, or of the first pattern that matches the key; None without any."""
        fitting = (pattern for pattern in self.rows if "*" in pattern and fnmatchcase(key, pattern))
        return self.rows.get(key) or next((self.rows[pattern] for pattern in fitting), None)


def table(project: str, algorithm: str, **changes: Change) -> Table:
    """Return the table of a project's keys for an algorithm; functions that it names are in `changes` or in CHANGES."""
    text = resources.files("rlhf_importers").joinpath("keys", f"{project}.txt").read_text()
    return parse(text, algorithm, {**CHANGES, **changes})


def parse(text: str, algorithm: str, changes: Mapping[str, Change], rollout: type[Rollout] = Rollout) -> Table:
    """Parse the rows of a table of keys that are for an algorithm; `rollout` says what restricts sampling."""
    read, prefix, is_ours = Table(changes), "", True
    for line in text.splitlines():
        if line.startswith("@"):
            prefix, is_ours = "", line == "@" or algorithm in line.split()
        elif line.startswith("["):
            prefix = line.strip("[]")
        elif line and is_ours and not line.startswith("#"):
            _read_row(read, prefix, line, rollout)
    return read


def _read_row(read: Table, prefix: str, line: str, rollout: type[Rollout]) -> None:
    found = ROW.fullmatch(line)
    assert found, f"no row of a table: {line}"
    row = found["outcome"], found["text"]
    for each in found["keys"].split():
        names, _, default = each.partition("=")
        key, *older = names.split("|")
        read.rows[prefix + key] = _sampling_row(found["text"], rollout) if row[0] == "sampling" else row
        read.newer.update(dict.fromkeys(older, prefix + key))
        if default:
            read.defaults[prefix + key] = scalar(default)


def _sampling_row(text: str, rollout: type[Rollout]) -> Row:
    """Return the row of a sampling parameter of vLLM: mapped to the rollout field that sets it, or lost without one."""
    restrictions = rollout.sampling_restrictions().items()
    fields = {each.parameter: to_camel(name) for name, each in restrictions if each.parameter}
    parameter, *change = text.split()
    if parameter in fields:
        return "to", " ".join([f"rollout.{fields[parameter]}", *change])
    *most, last = ("temperature", *fields.values())
    return "lost", f"sampling has {', '.join(most)} and {last}"


@dataclass
class Draft:
    """Unfinished manifest, and the outcome of each key of the converted configuration."""

    name: str = "imported"
    spec: dict[str, Any] = field(default_factory=dict)
    mapped: dict[str, str] = field(default_factory=dict)
    not_needed: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)

    @property
    def algorithm(self) -> str:
        """Return the name of the draft manifest's algorithm."""
        return str(self.spec["algorithm"]["name"])

    @property
    def role(self) -> str:
        """Return the role of the first model that the draft manifest's algorithm trains."""
        return ALGORITHMS[self.algorithm].trained[0]

    def put(self, path: str, value: Any) -> None:
        """Set a field of the draft manifest's spec; a value of None only creates the objects above the field."""
        *above, last = path.replace("<role>", self.role).split(".")
        place = self.spec
        for part in above:
            place = place.setdefault(part, {})
        if value is not None:
            place[last] = value

    def get(self, path: str) -> Any:
        """Return the value of a field of the draft manifest's spec, or None if the field is not set."""
        place: Any = self.spec
        for part in path.replace("<role>", self.role).split("."):
            place = place.get(part, {}) if isinstance(place, dict) else {}
        return None if place == {} else place

    def has(self, path: str) -> bool:
        """Whether the draft manifest's algorithm has the field or the model at this path; True for all other paths."""
        top, part, *_ = [*path.split("."), ""]
        algorithm = ALGORITHMS[self.algorithm]
        if top == "models" and part in get_args(Role):
            return part in (*algorithm.trained, *algorithm.frozen)
        return top != "algorithm" or part in {each.alias or name for name, each in algorithm.model_fields.items()}

    def document(self) -> dict[str, Any]:
        """Return the draft as a manifest's document, of JSON types."""
        spec = {part: self.spec[part] for part in SECTIONS if part in self.spec}
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": self.name}, "spec": spec}


class Values(dict[str, Any]):
    """Configuration values by key, None for a missing key; `last` is the key that was read last, for errors."""

    last = ""

    def __getitem__(self, key: str) -> Any:
        return self.get(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.last = key
        return super().get(key, default)


def fill(draft: Draft, table: Table, given: Mapping[str, Any]) -> Values:
    """Convert each given key into the draft manifest; return all values, with defaults, by their newer names.

    The table says how. Given values win over defaults, whose keys get no outcome in the draft. The value of a newer
    name wins over that of an older name.
    """
    given = dict(sorted(given.items(), key=lambda item: item[0] not in table.newer))
    values = {table.newer.get(key, key): value for key, value in given.items()}
    for key, value in table.defaults.items():
        if key not in values:
            _fill_one(draft, Draft(), key, value, table)
    for key, value in given.items():
        _fill_one(draft, draft, key, value, table)
    return Values(table.defaults | values)


def _fill_one(draft: Draft, report: Draft, key: str, value: Any, table: Table) -> None:
    outcome, text = table.row(table.newer.get(key, key)) or ("", "")
    text = text.replace("<role>", draft.role)
    if not outcome:
        report.unknown.append(key)
    elif outcome == "lost" and value not in OFF:
        report.lost[key] = text
    elif outcome == "lost":
        report.not_needed[key] = "is off there, as here"
    elif outcome == "skip":
        report.not_needed[key] = text
    elif value is None:
        report.not_needed[key] = "is null, as if it were not there"
    elif outcome == "with":
        report.mapped[key] = text
    else:
        _put(draft, report, key, value, table, *text.split(" ", 1))


def _put(draft: Draft, report: Draft, key: str, value: Any, table: Table, path: str, how: str = "") -> None:
    try:
        if not draft.has(path):
            raise OffError(f"{draft.algorithm} has no such option")
        if how.startswith("= "):
            draft.put(path, scalar(how.removeprefix("= ")))
        else:
            draft.put(path, table.changes[how.strip("()")](value) if how else value)
    except OffError as why:
        report.not_needed[key] = str(why)
    except NoCounterpartError as why:
        report.lost[key] = str(why)
    except (TypeError, ValueError, OverflowError):
        report.lost[key] = f"{value!r} is not what spec.{path} takes"
    else:
        report.mapped[key] = path


def one_of(choices: Mapping[Any, str]) -> Callable[[Any], str]:
    """Return a function that maps another project's value to ours by `choices`; NoCounterpartError for other values."""

    def change(value: Any) -> str:
        if value not in choices:
            raise NoCounterpartError(f"there is no {value} here; expected one of {', '.join(map(str, choices))}")
        return choices[value]

    return change


def schedule(value: Any) -> str:
    """Return our name of transformers' learning-rate schedule; NoCounterpartError without a counterpart."""
    name = str(value).lower()
    if name in ("constant", "constant_with_warmup"):
        return "Constant"
    if name.startswith("cosine"):
        return "Cosine"
    raise NoCounterpartError(f"there is no {value} here, but Constant and Cosine, which ends at a tenth of the peak")


def above_zero(value: Any) -> int:
    """Return a number of steps or rows above 0. OffError for 0 and less, which mean never or all."""
    if float(value) <= 0:
        raise OffError(f"{value} is none, or all; here nothing says so")
    if float(value) < 1:
        raise NoCounterpartError(f"{value} is a share of the run; write a number of steps")
    return int(value)


def flag(value: Any) -> bool:
    """Whether a value of another project's configuration turns its option on."""
    return value in (True, "true", "True", "1", 1)


def flat(part: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested mappings; an empty mapping is a value."""
    if isinstance(part, dict) and part:
        for key, below in part.items():
            yield from flat(below, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, part


def uri_of(place: Any) -> str:
    """Return the URI of a model or data set: `org/name` is on the Hugging Face Hub, a path is a file."""
    text = str(place)
    if "://" in text:
        return text
    is_path = text.startswith(("/", "./", "../", "~", "$")) or text.endswith(FILES) or text.count("/") != 1
    return f"file://{Path(text).expanduser()}" if is_path else f"hf://{text}"


CHANGES: Mapping[str, Change] = {
    "above_zero": above_zero,
    "flag": flag,
    "opposite": lambda value: not value,
    "schedule": schedule,
    "text": str,
    "uri": uri_of,
}
