"""Reader of a run folder, which may be unfinished, failed or partly missing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rlhf_api import kubectl_yaml
from rlhf_api.files import document_of
from rlhf_api.job import Job
from rlhf_api.status import Status
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.run_folder.attempt import from_json
from rlhf_trainer.run_folder.commands import job_files
from rlhf_trainer.run_folder.evidence import ATTEMPT, EMPTY, RUN, parsed
from rlhf_trainer.run_folder.rollouts import ROLLOUTS, parse_row
from rlhf_trainer.why.seen import Seen

if TYPE_CHECKING:
    from pandas import DataFrame

T = TypeVar("T")
STEP_WARNING = re.compile(r"\S+ step (?P<step>\d+): (?P<message>.*)")
Place = tuple[int, int]
"""(step, row in the step's batch) of a response in rollouts.jsonl."""
MAX_STEPS, ROWS_OF_A_STEP = 50, 40
"""Most steps, and most rows of each, that are read from the kept responses."""


@dataclass(frozen=True)
class Rollouts:
    """Responses in a job's rollouts.jsonl: the rows that page and `why` read, and counts of all rows and steps."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """Rows that `first_rows` chooses, in the order of step and row, so that responses to a prompt are together."""
    kept: int = 0
    steps: int = 0


class Event(NamedTuple):
    """Event of one rank or of the controller; times in seconds after the begin of the first step."""

    pool: str
    """Name of the rank's pool; empty for the controller."""
    rank: int
    phase: str
    name: str
    step: int
    """Step for which the rank did the event's work."""
    start: float
    end: float


@dataclass
class JobRecord:
    """Content of one job's folder; a missing file is an empty value, and `notes` names unreadable files."""

    name: str
    settings: Mapping[str, Any]
    status: Status
    records: list[dict[str, float]]
    """Lines of metrics.jsonl in the order of the steps; if a step ran twice, its later line."""
    samples: list[dict[str, Any]]
    events: list[str]
    summary: Mapping[str, Any]
    rollouts: Rollouts = field(default_factory=Rollouts)
    mapping: Mapping[str, Any] = field(default_factory=dict)
    """Mapping of the job: pools, parallel sizes and predictions, as `rlhf plan --json` prints them."""
    trace: list[Event] = field(default_factory=list)
    """Events of ranks and controller in the traced steps."""
    notes: list[str] = field(default_factory=list)

    def metrics(self) -> DataFrame:
        """Return the records as a pandas DataFrame with a row a step; a metric that a step lacks is NaN."""
        from pandas import DataFrame

        return DataFrame(self.records or {"step": []}).set_index("step")

    def seen(self, last: int | None = None) -> Seen:
        """Return the view of the job for `why`, up to the step `last` (None: all steps)."""
        records, rows = self.records, self.rollouts.rows
        if last is not None:
            records, rows = ([each for each in given if each["step"] <= last] for given in (records, rows))
        return Seen(self.spec, records, rows, self.summary)

    @property
    def spec(self) -> Mapping[str, Any]:
        return self.settings.get("spec") or {}

    @property
    def algorithm(self) -> str:
        return str((self.spec.get("algorithm") or {}).get("name", "unknown algorithm"))

    @property
    def warnings(self) -> dict[str, list[int]]:
        """Return the warnings of the job: sentence -> steps that gave the warning."""
        found: dict[str, list[int]] = {}
        for match in filter(None, map(STEP_WARNING.fullmatch, self.events)):
            found.setdefault(match["message"], []).append(int(match["step"]))
        if failure := self.status.last_failure:
            found = {message: steps for message, steps in found.items() if not failure.message.endswith(message)}
        return found


@dataclass(frozen=True)
class Run:
    """Jobs and environment of a run, as `read_run` reads them from its folder."""

    name: str
    jobs: list[JobRecord]
    """Jobs in the order in which they began."""
    environment: Mapping[str, Any]
    """Facts on the machine and the packages of the attempt that began last."""

    def __getitem__(self, job: str) -> JobRecord:
        """Return the job of this name; KeyError if there is none."""
        return {each.name: each for each in self.jobs}[job]


def read_run(folder: Path) -> Run:
    """Read a run folder for the report. ConfigError if `folder` is no run folder."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is no run folder: there is no such folder")
    paths = [file.parent for file in job_files(folder)]
    if not paths:
        raise ConfigError(f"{folder}: is no run folder: it holds no <job>/job.yaml, which `rlhf run` writes first")
    notes: list[str] = []
    summary: dict[str, Any] = _read(folder / "summary.json", _object, {}, notes)
    summaries = {name: measured for name, measured in summary.items() if isinstance(measured, dict)}
    ran_on = [attempt for path in paths for attempt in _read(path / RUN, parsed, EMPTY, notes)["attempts"][-1:]]
    jobs = [_job(path, summaries.get(path.name, {}), notes) for path in paths]
    jobs.sort(key=lambda job: job.status.start_time or "")
    last = max(ran_on, key=lambda attempt: str(attempt.get("began")), default={})
    environment = {name: value for name, value in last.items() if name not in ATTEMPT}
    return Run(folder.resolve().name, jobs, environment)


def _job(folder: Path, summary: Mapping[str, Any], run_notes: list[str]) -> JobRecord:
    notes = list(run_notes)
    lines = [row for row in _json_lines(folder / "metrics.jsonl", notes) if isinstance(row.get("step"), int)]
    numbers = [{name: value for name, value in row.items() if isinstance(value, int | float)} for row in lines]
    samples = [row for row in _json_lines(folder / "samples.jsonl", notes) if "prompt" in row]
    return JobRecord(
        name=folder.name,
        rollouts=_read_rollouts(folder / ROLLOUTS, notes),
        settings=_read(folder / "job.yaml", _settings, {}, notes),
        status=_read(folder / "status.json", Status.model_validate_json, Status(), notes),
        records=[by_step for _, by_step in sorted({line["step"]: line for line in numbers}.items())],
        samples=samples,
        events=_lines(folder / "events.log"),
        summary=summary,
        mapping=_read(folder / "mapping.json", _mapping, {}, notes),
        trace=_read(folder / "trace.json", events, [], notes),
        notes=notes,
    )


def _read(path: Path, parse: Callable[[str], T], default: T, notes: list[str]) -> T:
    """Return a parsed file of a run folder, or the default if it is missing or damaged; damage adds a note."""
    if not path.is_file():
        return default
    try:
        return parse(_text(path))
    except (ValueError, TypeError, LookupError, RecursionError):
        notes.append(f"{path.name} cannot be read")
        return default


def _settings(text: str) -> dict[str, Any]:
    return document_of(Job.parse(kubectl_yaml.read(text, "")[0]))


def _object(text: str) -> dict[str, Any]:
    return dict(from_json(text))


def _mapping(text: str) -> dict[str, Any]:
    mapping = _object(text)
    mapping_line(mapping)  # raises LookupError or TypeError where the page could not print it
    return mapping


def mapping_line(mapping: Mapping[str, Any]) -> str:
    """Return a mapping as one line: `2 x cpu-slot: actor 1-1-2, generation 1-1 | 1 x cpu-slot: reward 1-1-1`."""
    return " | ".join(
        f"{pool['gpus']} x {pool['gpu']}: {'; '.join(_sizes(role, mapping['models'][role]) for role in pool['models'])}"
        for pool in mapping.get("pools", ())
    )


def _sizes(role: str, sizes: Mapping[str, Any]) -> str:
    generation = f", generation {sizes['p_g']}-{sizes['t_g']}" if "p_g" in sizes else ""
    return f"{role} {sizes['p']}-{sizes['t']}-{sizes['d']}{generation}"


def _json_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file; a run in progress may have written half of the last line."""
    rows, damaged = [], 0
    for line in _lines(path):
        try:
            rows.append(_object(line))
        except (ValueError, TypeError):
            damaged += 1
    _note_damage(path, damaged, len(rows), notes)
    return rows


def _note_damage(path: Path, damaged: int, whole: int, notes: list[str]) -> None:
    if damaged:
        notes.append(f"{path.name}: {damaged} of {damaged + whole} lines cannot be read and are left out")


def _lines(path: Path) -> list[str]:
    """Return the lines of a file that are not empty; str.splitlines would split at more characters than newlines."""
    return [line for line in _text(path).split("\n") if line]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _read_rollouts(file: Path, notes: list[str]) -> Rollouts:
    """Read the `first_rows` of a rollouts.jsonl, which may exceed the memory; none if there is no file."""
    if not file.is_file():
        return Rollouts()
    starts: dict[Place, int] = {}
    damaged = start = 0
    with file.open("rb") as lines:
        for line in lines:
            if row := parse_row(line):
                starts[row["step"], row["row"]] = start
            elif line.strip():
                damaged += 1
            start += len(line)

        def row_at(place: Place) -> dict[str, Any]:
            lines.seek(starts[place])
            return parse_row(lines.readline())

        rows = [*map(row_at, first_rows(starts))]
    _note_damage(file, damaged, len(starts), notes)
    return Rollouts(rows, len(starts), len({step for step, _ in starts}))


def first_rows(places: Collection[Place]) -> list[Place]:
    """Return the first ROWS_OF_A_STEP places (step, row) of at most MAX_STEPS steps, spread over all steps."""
    steps = sorted({step for step, _ in places})
    shown, counts, chosen = {*steps[:: -(-len(steps) // MAX_STEPS) or 1]}, Counter[int](), []
    for step, row in sorted(places):
        counts[step] += 1
        if step in shown and counts[step] <= ROWS_OF_A_STEP:
            chosen.append((step, row))
    return chosen


def events(text: str) -> list[Event]:
    """Return the events of a trace.json. ValueError, TypeError or LookupError if the file is damaged."""
    rows = from_json(text)["traceEvents"]
    processes = {row["pid"]: str(row["args"]["name"]) for row in rows if row["name"] == "process_name"}
    return [
        Event(
            pool=processes[row["pid"]].partition("pool ")[2],
            rank=int(row["tid"]),
            phase=str(row["cat"]),
            name=str(row["name"]),
            step=int(row["args"]["step"]),
            start=row["ts"] / 1e6,
            end=(row["ts"] + row["dur"]) / 1e6,
        )
        for row in rows
        if row["ph"] == "X"
    ]
