"""Measurements of each process (weighted means, deviations, maxima, sums, time spans), and their merge."""

import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, SupportsFloat
from zlib import crc32

from rlhf_api.problems import legible
from rlhf_trainer.device import memory_in_use

TRANSFER = "transfer"
"""Phase of the times in which a rank fetches the fields it reads, or waits for weights."""
CONTROLLER = "controller"
"""Phase of the controller's times: its steps, dispatches and waits."""
ENDPOINTS = "rollout.endpoints"
"""Pool name of the process that calls external generation servers. The process takes no GPU or CPU worker."""

EPISODE, MODEL_CALL, ENVIRONMENT, TOOL = "episode", "model", "environment", "tool"
"""Phases of episodes: a whole one; an answer of the model; a call of the environment; and a call of a tool."""
EPISODE_PHASES = (EPISODE, MODEL_CALL, ENVIRONMENT, TOOL)
"""Phases whose spans overlap on a rank; they lie within the rank's generation, which alone is counted as its work."""

MAX_NAME = 100
"""Most characters of a span's name."""
_OPEN_SPAN: ContextVar[int] = ContextVar("_OPEN_SPAN", default=0)
"""Id of the innermost open span of this thread; 0: none."""


@dataclass(frozen=True)
class Span:
    """One activity of a rank, from `start` to `end`, in seconds of its machine's clock."""

    phase: str
    name: str
    rank: int
    start: float
    end: float
    pool: str = ""
    """Name of the rank's pool, as each pool has a rank 0; empty for the controller and under torchrun."""
    parent: int = 0
    """Id of the span of this rank within which this one lies; 0: none but the step's."""
    id: int = field(default_factory=lambda: secrets.randbits(64) or 1, compare=False)


@dataclass
class Report:
    """The measurements of one process since its last report."""

    means: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Weighted means: name -> (weighted total, weight)."""
    deviations: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Standard deviations: name -> (weighted total, weighted total of the squares, weight)."""
    maxima: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    warnings: dict[str, str] = field(default_factory=dict)
    """Key of a warning -> its sentence; a key warns once a step."""
    examples: list[str] = field(default_factory=list)
    """Descriptions of some responses, for warnings on all of them."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The measurements of a finished step, for the outputs and the run folder."""

    record: Mapping[str, float]
    """Measurements of the step, merged over ranks, by their names in metrics.jsonl; `step` is the step's number."""
    warnings: Sequence[str]
    examples: Sequence[str] = ()
    """Descriptions of up to two responses of the step."""
    ranks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Checksums of the ranks' measurements by call (`fingerprints`)."""
    spans: Sequence[Span]
    """Timed activities of every rank and of the controller in the step; the first is the step itself."""


class Recorder:
    """Collector of the measurements of this process, which `drain` returns."""

    def __init__(self) -> None:
        self.rank = 0
        self.pool = ""
        self._report = Report()
        self._means: dict[str, tuple[Any, Any]] = {}
        self._maxima: dict[str, list[SupportsFloat]] = {}
        self._counts = True

    @contextmanager
    def counting(self, counts: bool) -> Iterator[None]:
        """Keep means and sums of the block only if `counts`, which is true on one of several ranks with equal rows."""
        before, self._counts = self._counts, counts
        try:
            yield
        finally:
            self._counts = before

    def mean(self, name: str, total: SupportsFloat, weight: SupportsFloat) -> None:
        """Add to a weighted mean; the record holds sum(total) / sum(weight) over all ranks and calls.

        Tensors are added up where they are, in 64 bits, and read by `drain`: each reading waits for the device.
        """
        if not self._counts:
            return
        old_total, old_weight = self._means.get(name, (0.0, 0.0))
        self._means[name] = (old_total + _in_64_bits(total), old_weight + _in_64_bits(weight))

    def deviation(self, name: str, total: SupportsFloat, squares: SupportsFloat, weight: SupportsFloat) -> None:
        """Add to a standard deviation over all ranks and calls; total, squares: weighted sums of values and squares."""
        if self._counts:
            known = self._report.deviations.get(name, (0.0, 0.0, 0.0))
            added = (float(total), float(squares), float(weight))
            self._report.deviations[name] = (known[0] + added[0], known[1] + added[1], known[2] + added[2])

    def maximum(self, name: str, value: SupportsFloat) -> None:
        """Add a value to a maximum over all ranks and calls; a tensor is read by `drain`."""
        self._maxima.setdefault(name, []).append(value)

    def add(self, name: str, value: float) -> None:
        """Add a value to a sum over all ranks and calls."""
        if self._counts:
            self._report.sums[name] = self._report.sums.get(name, 0.0) + float(value)

    def warn(self, name: str, message: str) -> None:
        """Report a problem that does not stop the run; it is shown once a step, on however many ranks it occurs."""
        self._report.warnings[name] = legible(message)  # the text may quote long or non-Unicode parts

    def example(self, text: str) -> None:
        """Note the description of a response, for warnings on all responses of the step."""
        self._report.examples.append(text)

    @contextmanager
    def span(self, phase: str, name: str = "", *, since: float | None = None) -> Iterator[None]:
        """Time the block; `since`: an earlier start, if the activity began elsewhere (by that machine's clock)."""
        opened = self.begin(phase, name, start=min(time.time(), since or math.inf))
        token = _OPEN_SPAN.set(opened.id)
        try:
            yield
        finally:
            _OPEN_SPAN.reset(token)
            self.end(opened)
            if phase not in (TRANSFER, CONTROLLER):
                used, limit = memory_in_use()
                self.maximum(f"memory_bytes/{phase}", used)
                self.maximum("memory_used", used / limit)

    def begin(self, phase: str, name: str = "", *, within: Span | None = None, start: float | None = None) -> Span:
        """Return the beginning of a span that `end` records; within: its parent, by default the thread's open span.

        Unlike `span`, spans of one thread may overlap, such as those of episodes.
        """
        words = legible(name or phase, MAX_NAME)  # the model may have written it
        began, parent = time.time() if start is None else start, within.id if within else _OPEN_SPAN.get()
        return Span(phase, words, self.rank, began, began, self.pool, parent)

    def end(self, begun: Span, end: float | None = None) -> Span:
        """Record a span that has begun, and return it; end: seconds of this machine's clock, by default now."""
        ended = replace(begun, end=time.time() if end is None else end)
        self._report.spans.append(ended)
        return ended

    def drain(self) -> Report:
        """Return this process's measurements since the last call, and begin an empty report."""
        means = {name: (float(total), float(weight)) for name, (total, weight) in self._means.items()}
        maxima = {name: max(map(float, values)) for name, values in self._maxima.items()}
        report, self._report = replace(self._report, means=means, maxima=maxima), Report()
        self._means, self._maxima = {}, {}
        return report


def _in_64_bits(value: SupportsFloat) -> Any:
    """Convert a number, or a tensor on its device, to 64 bits; this module does not import torch."""
    return value.detach().double() if hasattr(value, "detach") else float(value)


recorder = Recorder()


def report_of(number: int, began: float, reports: Sequence[Report], repeats: Callable[[str], bool]) -> StepReport:
    """Return a step's metrics for metrics.jsonl (times in seconds), warnings and time spans; the step ends now.

    Metrics that are not finite are left out: JSON has no such values, and `skipped_updates` counts what they prevented.
    repeats: as in `fingerprints`.
    """
    seconds = time.time() - began
    spans = [span for report in reports for span in report.spans]
    work = [span for span in spans if span.phase not in EPISODE_PHASES]
    record = {"step": number, **merge(reports), **phase_seconds(work, seconds), **slot_seconds(work, seconds)}
    record |= utilization(record, work, seconds) | idle_shares(record, work) | effective_share(record)
    explained_variance(record)
    for name in ("peak_flops", "correction/squared_weight"):
        record.pop(name, None)
    if "tokens" in record:
        record["tokens_per_second"] = record.pop("tokens") / seconds
    finite = {name: value for name, value in record.items() if math.isfinite(value)}
    examples = [*dict.fromkeys(example for report in reports for example in report.examples)]
    warnings = {name: message for report in reports for name, message in report.warnings.items()}
    return StepReport(
        record=finite,
        examples=examples[:2],
        ranks=fingerprints(reports, repeats),
        warnings=[warnings[name] for name in sorted(warnings)],
        spans=[Span(CONTROLLER, f"step {number}", 0, began, began + seconds), *spans],
    )


def merge(reports: Iterable[Report]) -> dict[str, float]:
    """Merge the measurements of all ranks and calls into one flat record; time spans are left to `phase_seconds`."""
    total = Recorder()
    for report in reports:
        for name, (value, weight) in report.means.items():
            total.mean(name, value, weight)
        for name, sums in report.deviations.items():
            total.deviation(name, *sums)
        for name, value in report.maxima.items():
            total.maximum(name, value)
        for name, value in report.sums.items():
            total.add(name, value)
    merged = total.drain()
    means = {name: value / weight for name, (value, weight) in merged.means.items() if weight}
    deviations = {
        name: math.sqrt(max(0.0, squares / weight - (value / weight) ** 2))
        for name, (value, squares, weight) in merged.deviations.items()
        if weight
    }
    return {**means, **deviations, **merged.maxima, **merged.sums}


def fingerprints(reports: Iterable[Report], repeats: Callable[[str], bool]) -> dict[str, dict[str, int]]:
    """Return, for each call of a step in their order, `pool/rank` -> CRC-32 of the rank's own measurements in it.

    repeats: whether the value of a name is the same if the step is made again.
    """
    found: dict[str, dict[str, int]] = {}
    for report in reports:
        parts = (report.means, report.deviations, report.sums)  # these are of the rank's own rows, unlike maxima
        values = {name: value for part in parts for name, value in part.items() if repeats(name)}
        span = next((each for each in report.spans if each.phase not in (CONTROLLER, *EPISODE_PHASES)), None)
        if values and span:
            ranks, rank = found.setdefault(span.name.partition(":")[0], {}), f"{span.pool}/{span.rank}"
            ranks[rank] = crc32(json.dumps(values, sort_keys=True).encode(), ranks.get(rank, 0))
    return found


def phase_seconds(spans: Iterable[Span], step_seconds: float) -> dict[str, float]:
    """Return `time/<phase>` of a step in seconds: the time in which at least one rank was in that phase.

    `time/transfer` is the time in which ranks only moved or awaited data; `time/controller` that in which no rank did
    anything.
    """
    by_phase: dict[str, list[Span]] = {}
    for span in spans:
        if span.phase != CONTROLLER:
            by_phase.setdefault(span.phase, []).append(span)
    seconds = {f"time/{phase}": covered(group) for phase, group in by_phase.items() if phase != TRANSFER}
    work = [span for phase, group in by_phase.items() if phase != TRANSFER for span in group]
    everything = covered(work + by_phase.get(TRANSFER, []))
    seconds["time/transfer"] = everything - covered(work)
    seconds["time/controller"] = max(0.0, step_seconds - everything)
    return {"time/step": step_seconds, **seconds}


def slot_seconds(spans: Sequence[Span], step_seconds: float) -> dict[str, float]:
    """Return `busy/<pool>` and `idle/<pool>` of a step: seconds of all ranks of a pool in a phase, and in none.

    A rank that waits for fields or for other pools is idle, also in the middle of a phase. Ranks under torchrun are in
    no pool.
    """
    seconds: dict[str, float] = {}
    for pool, rank in sorted(slots_of(spans)):
        own = [each for each in spans if (each.pool, each.rank) == (pool, rank)]
        waited = covered(each for each in own if each.phase == TRANSFER)
        busy = min(covered(own) - waited, step_seconds)
        if pool:
            seconds[f"busy/{pool}"] = seconds.get(f"busy/{pool}", 0.0) + busy
            seconds[f"idle/{pool}"] = seconds.get(f"idle/{pool}", 0.0) + step_seconds - busy
    return seconds


def idle_shares(record: Mapping[str, float], spans: Sequence[Span]) -> dict[str, float]:
    """Return `rollout_idle` and `trainer_idle`, idle shares of the rollout-only and actor's pool; {} without these."""
    pools = {role: {span.pool for span in spans if span.name.startswith(f"{role}.")} for role in ("rollout", "actor")}
    shares = {}
    for name, role in (("rollout_idle", "rollout"), ("trainer_idle", "actor")):
        idle, busy = (sum(record[f"{what}/{pool}"] for pool in pools[role]) for what in ("idle", "busy"))
        if pools["rollout"] and idle + busy:
            shares[name] = idle / (idle + busy)
    return shares


def utilization(record: Mapping[str, float], spans: Iterable[Span], step_seconds: float) -> dict[str, float]:
    """Return the `mfu` of a step: FLOPs of the models / peak FLOPs of all ranks' GPUs; empty if the peak is unknown."""
    slots = [pool for pool, _ in slots_of(spans) if pool != ENDPOINTS]
    peak = step_seconds * len(slots) * record.get("peak_flops", 0.0)
    done = sum(value for name, value in record.items() if name.startswith("flops/"))
    return {"mfu": done / peak} if peak else {}


def effective_share(record: Mapping[str, float]) -> dict[str, float]:
    """Return `correction/effective_size`, mean(w)^2 / mean(w^2) of importance weights w (Kong 1992); {} without them.

    It is 1 where all weights are equal, and k / n where k of n are equal and the others 0.
    """
    mean, square = record.get("correction/weight"), record.get("correction/squared_weight")
    return {"correction/effective_size": mean**2 / square} if mean is not None and square else {}


def explained_variance(record: dict[str, float]) -> None:
    """Put `explained_variance/<critic>`, 1 - Var(return - value) / Var(return), in place of the moments it comes from.

    It is 1 if values are the returns, 0 if a constant would do as well, and below 0 if they are worse than that.
    """
    for critic in [name.partition("/")[2] for name in record if name.startswith("returns/")]:
        moments = [[record.pop(f"{of}{what}/{critic}") for what in ("", "_square")] for of in ("errors", "returns")]
        errors, returns = (square - mean**2 for mean, square in moments)
        if returns > 0:
            record[f"explained_variance/{critic}"] = 1.0 - errors / returns


def slots_of(spans: Iterable[Span]) -> set[tuple[str, int]]:
    """Return (pool, rank) of each rank with a timed activity; the client of external servers is in pool `ENDPOINTS`."""
    return {(span.pool, span.rank) for span in spans if span.phase != CONTROLLER}


def covered(spans: Iterable[Span]) -> float:
    """Return the seconds that at least one of the time spans covers."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total
