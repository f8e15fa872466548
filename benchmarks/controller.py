"""Cost of a PPO step for the controller, by workers and by bytes: python benchmarks/controller.py [--json PATH].

Workers that only give zeros of the declared shapes, on one pool: the time of a step is that of dispatch and collection.
Up to 16 are Ray's (each a process), and up to 1,024 simulated: objects in this process in the place of Ray's module,
which answer at once, so that what is left is the controller's own code. In the same run actors without anything of ours
are sent the same calls, results and references: calls only; with results of the same shapes; with references as
arguments;
and with references inside a list. The cost of that is Ray's.

CPU seconds are those of all threads of this process; the first steps of each setting are left out and of the others the
median counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
from rich.console import Console
from rich.table import Table

from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.algorithms import PolicyGradient
from rlhf_trainer.controller import worker_group
from rlhf_trainer.controller.batch import BatchFuture, PayloadMeter
from rlhf_trainer.controller.call_log import CallLog
from rlhf_trainer.controller.resource_pool import ResourcePool
from rlhf_trainer.controller.slot_process import Outcome
from rlhf_trainer.controller.worker_group import ModelHandle, WorkerGroup
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.fields import FIELDS, Width
from rlhf_trainer.meeting import Meeting
from rlhf_trainer.run.session import ray_session
from rlhf_trainer.run.worker_specs import workers_of
from rlhf_trainer.telemetry import Report
from rlhf_trainer.types import TRANSFER_MARK, Batch, Fields, Transfer, transfers_of
from rlhf_trainer.workers.advantage import AdvantageWorker, advantage_transfers
from rlhf_trainer.workers.data import DataWorker

ROWS, TOKENS, DEADLINE = 4, 16, 300.0
"""Rows of a worker, and tokens of a row where the batch is the smallest."""
TIMES = (1, 16, 256)
"""The sizes of the batch that are compared."""
REAL, SIMULATED = (2, 4, 8, 16), (2, 4, 8, 16, 64, 256, 1024)
WARM_UP, STEPS = 3, 7
Figures = dict[str, float]
CALLS, RESULTS, ARGUMENTS, NESTED = PARTS = ("calls", "+ results", "+ arguments", "nested instead")
"""How a step is played."""
Shapes = Sequence[Sequence[int]]
Result = tuple[int, int, int]
"""(number of the call, rank, number of the result)."""


@dataclass(frozen=True)
class PlainCall:
    """Call of a step on one rank: shapes of the returned tensors, and earlier results that are sent along."""

    shapes: Shapes
    reads: Sequence[Result]


Script = Sequence[Sequence[PlainCall]]
"""[number of the call][rank], in the order in which they are made."""


class Plain:
    """An actor that returns zeros."""

    def __init__(self, shapes: Sequence[Shapes]) -> None:
        self._shapes = shapes

    def call(self, number: int, has_results: bool, *given: Any) -> Any:
        if given and isinstance(given[0], list):
            ray.get(given[0])
        pieces = [torch.zeros(*shape) for shape in self._shapes[number]] if has_results else []
        return (*pieces, None) if pieces else None


def play(actors: Sequence[Any], script: Script, part: str) -> None:
    """One step, until all its calls have ended."""
    results: dict[Result, ray.ObjectRef] = {}
    reports = []
    for number, calls in enumerate(script):
        for rank, (actor, call) in enumerate(zip(actors, calls, strict=True)):
            has_results = part != CALLS and bool(call.shapes)
            references = [results[each] for each in call.reads] if part in (ARGUMENTS, NESTED) else []
            given = [references] if part == NESTED else references
            method = actor.call.options(num_returns=len(call.shapes) + 1 if has_results else 1)
            sent = method.remote(number, has_results, *given)
            made = sent if has_results else [sent]
            reports.append(made[-1])
            results.update({(number, rank, index): one for index, one in enumerate(made[:-1])})
    ray.get(reports)


def cpu_of(script: Script, *, warm_up: int, steps: int) -> Mapping[str, float]:
    """CPU seconds of this process, in all its threads, for a step of each kind; Ray is running."""
    process = ray.remote(num_cpus=1)(Plain)
    actors = [process.remote([call.shapes for call in mine]) for mine in zip(*script, strict=True)]
    found = {}
    for part in PARTS:
        samples = []
        for _ in range(warm_up + steps):
            began = time.process_time()
            play(actors, script, part)
            samples.append(time.process_time() - began)
        found[part] = median(samples[warm_up:])
    for actor in actors:
        ray.kill(actor)
    return found


def stand_in(worker_class: type, tokens: int) -> type:
    """Make a worker with the same marked methods, which add nothing but zeros."""
    algorithm = ALGORITHMS["PPO"]
    assert issubclass(algorithm, PolicyGradient)
    marks = advantage_transfers(algorithm) if worker_class is AdvantageWorker else transfers_of(worker_class)
    return type("StandIn", (), {name: standing_in(transfer, tokens) for name, transfer in marks.items()})


def standing_in(transfer: Transfer, tokens: int) -> Callable[..., Fields]:
    """The method for such a mark."""

    def call(_: object, batch: Batch, **options: Any) -> Fields:  # noqa: ARG001
        return {
            name: torch.zeros(shape(name, batch.size, tokens), dtype=FIELDS[name].dtype) for name in transfer.adds or ()
        }

    setattr(call, TRANSFER_MARK, transfer)
    return call


def shape(name: str, rows: int, tokens: int) -> list[int]:
    """Return the shape of so many rows of a field."""
    return [rows] if FIELDS[name].width is Width.ONE else [rows, tokens]


def rank_here(_: Meeting | None = None) -> int:
    """The rank of a worker; no process group is needed."""
    return int(os.environ["RANK"])


class Reference:
    """A value that is there at once."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


Sent = tuple[tuple[Any, ...], list[Reference]]
"""The arguments of a call, and the references that it returned."""


class Method:
    """A remote method of a simulated worker."""

    def __init__(self, answer: Callable[[Sequence[Any]], Any]) -> None:
        self._answer = answer
        self._results = 1
        self.sent: list[Sent] | None = None

    def options(self, *, num_returns: int = 1) -> Method:
        """The method with so many results."""
        chosen = Method(self._answer)
        chosen._results, chosen.sent = num_returns, self.sent
        return chosen

    def remote(self, *given: Any, **_: Any) -> Any:
        answer = self._answer(given)
        references = [Reference(answer) for _ in range(self._results)]
        if self.sent is not None:
            self.sent.append((given, references))
        return references if self._results > 1 else references[0]


class Worker:
    """A simulated process of a slot."""

    def __init__(self) -> None:
        self.run = Method(lambda given: [Outcome(each.number, None, Report()) for each in given[0]])
        self.rendezvous = Method(lambda _: ("localhost", 1))
        self.join = self.build = Method(lambda _: 0)


class Simulated:
    """Stand-in for the part of Ray's module that the controller uses."""

    exceptions = ray.exceptions
    ObjectRef = Reference

    def remote(self, **_: Any) -> Callable[[type], Any]:
        return lambda _: self

    def options(self, **_: Any) -> Any:
        made = Method(lambda _: None)
        setattr(made, "remote", lambda **_: Worker())  # noqa: B010
        return made

    @staticmethod
    def wait(pending: list[Reference], *, num_returns: int = 1, **_: Any) -> tuple[list[Reference], list[Reference]]:
        return pending[:num_returns], pending[num_returns:]

    @staticmethod
    def get(references: Sequence[Reference], **_: Any) -> list[Any]:
        return [reference.value for reference in references]


class Slots(ResourcePool):
    """Slots that nobody has to set aside."""

    def slots(self) -> list[tuple[Any, int]]:
        return [(None, rank) for rank in range(self.size)]


@contextmanager
def simulated(workers: int) -> Iterator[WorkerGroup]:
    """A group of simulated workers."""
    setattr(worker_group, "ray", Simulated())  # noqa: B010
    try:
        yield group_on(Slots([workers], name="all", device="CPU"))
    finally:
        setattr(worker_group, "ray", ray)  # noqa: B010


@contextmanager
def real(workers: int) -> Iterator[WorkerGroup]:
    """A group of Ray's workers."""
    with ray_session(None, cpu_slots=workers), PayloadMeter().watching():
        pool = ResourcePool([workers], name="all", device="CPU")
        pool.reserve(deadline=DEADLINE)
        group = group_on(pool)
        yield group
        group.stop()


def group_on(pool: ResourcePool) -> WorkerGroup:
    environment = {"OMP_NUM_THREADS": "1"}
    return WorkerGroup(pool, start=rank_here, environment=environment, log=CallLog(), deadline=DEADLINE)


def script_of(workers: int) -> Script:
    """The messages of a step with the smallest batch, as plain calls."""
    with simulated(workers) as group:
        models = models_of(group, TOKENS)
        for rank in group._ranks:  # noqa: SLF001
            rank.run.sent = []
        ALGORITHMS["PPO"].step(models.pop("data").load_batch(BatchFuture(step=1, size=ROWS * workers)), **models)
        group.send()
        calls: list[tuple[Sent, ...]] = list(zip(*(rank.run.sent for rank in group._ranks), strict=True))  # noqa: SLF001
    made = {
        reference: (number, rank, index)
        for number, ranks in enumerate(calls)
        for rank, (_, references) in enumerate(ranks)
        for index, reference in enumerate(references[:-1])
    }
    return [[plain(given, made) for given, _ in ranks] for ranks in calls]


def plain(given: Sequence[Any], made: dict[Reference, Result]) -> PlainCall:
    """A message without anything of ours in it."""
    requests, *references = given
    cuts = requests[-1].cuts.items()
    shapes = [shape(name, rows.stop - rows.start, TOKENS) for name, parts in cuts for rows in parts]
    return PlainCall(shapes, [made[reference] for reference in references])


def bare_figures(sizes: Sequence[int]) -> dict[int, Mapping[str, float]]:
    """Workers -> CPU seconds of a step without anything of ours."""
    found = {}
    for workers in sizes:
        with ray_session(None, cpu_slots=workers):
            found[workers] = cpu_of(script_of(workers), warm_up=WARM_UP, steps=STEPS)
    return found


def show_bare(found: dict[int, Mapping[str, float]], ours: dict[int, dict[int, Figures]]) -> None:
    """The table of what Ray alone costs."""
    table = Table(title="the same messages without our controller: CPU a worker")
    for column in ("workers", *PARTS, "ours"):
        table.add_column(column, justify="right")
    for workers, figure in found.items():
        seconds = [*(figure[part] for part in PARTS), cpu(ours[workers][1])]
        table.add_row(str(workers), *(f"{1e3 * each / workers:.2f} ms" for each in seconds))
    Console(width=100).print(table)
    calls = script_of(1)
    results, reads = (
        sum(len(each) for each in part) for part in zip(*((c.shapes, c.reads) for (c,) in calls), strict=True)
    )
    print(f"bare: {len(calls)} messages, {results} results and {reads} references a worker\n")


def models_of(group: WorkerGroup, tokens: int) -> dict[str, Any]:
    """PPO's models in a group."""
    classes = {"data": DataWorker, **workers_of(ALGORITHMS["PPO"])}
    workers = {f"{name}-{tokens}": stand_in(each, tokens) for name, each in classes.items()}
    group.build({name: WorkerSpec(each, {}) for name, each in workers.items()})
    group.wait_until_built()
    return {name.partition("-")[0]: ModelHandle(group, name, each) for name, each in workers.items()}


def measure(group: WorkerGroup, workers: int, times: int) -> Figures:
    """Seconds of a step: CPU of dispatch and of collection, and wall; and the calls of a step on each worker."""
    models = models_of(group, TOKENS * times)
    data = models.pop("data")
    gc.freeze()  # as the wiring of a run does
    log = group._log  # noqa: SLF001 the run's wiring holds it too
    log.drain(deadline=DEADLINE)
    samples: list[Figures] = []
    for step in range(1, WARM_UP + STEPS + 1):
        wall, began = time.perf_counter(), time.process_time()
        ALGORITHMS["PPO"].step(data.load_batch(BatchFuture(step=step, size=ROWS * workers)), **models)
        dispatched = time.process_time()
        reports = log.drain(deadline=DEADLINE)
        ended = time.process_time()
        samples.append(
            {
                "dispatch": dispatched - began,
                "collect": ended - dispatched,
                "wall": time.perf_counter() - wall,
                "calls": (len(reports) - 1) / workers,
            }
        )
    kept = samples[WARM_UP:]
    return {name: median(sample[name] for sample in kept) for name in kept[0]}


def figures(
    group_of: Callable[[int], Any], sizes: Sequence[int], many_times: Sequence[int]
) -> dict[int, dict[int, Figures]]:
    """Workers -> times the smallest batch -> figures."""
    found: dict[int, dict[int, Figures]] = {}
    for workers in sizes:
        with group_of(workers) as group:
            found[workers] = {times: measure(group, workers, times) for times in many_times}
    return found


def cpu(figure: Figures) -> float:
    """Seconds of dispatch and collection."""
    return figure["dispatch"] + figure["collect"]


def slope(found: dict[int, dict[int, Figures]]) -> float:
    """CPU seconds that a further worker costs, between the fewest and the most."""
    few, many = min(found), max(found)
    return (cpu(found[many][1]) - cpu(found[few][1])) / (many - few)


def show(kind: str, found: dict[int, dict[int, Figures]]) -> None:
    """The table of one kind of workers."""
    table = Table(title=f"one PPO step, {kind} workers: CPU of the controller")
    further = [times for times in next(iter(found.values())) if times > 1]
    bytes_columns = [f"bytes x{times}" for times in further]
    for column in ("workers", "dispatch", "collect", "CPU a worker", *bytes_columns, "wall"):
        table.add_column(column, justify="right")
    for workers, by_size in found.items():
        first = by_size[1]
        ratios = [f"{cpu(by_size[times]) / cpu(first):.2f} of it" for times in further]
        cells = [f"{1e3 * first[name]:.1f} ms" for name in ("dispatch", "collect")]
        each = f"{1e3 * cpu(first) / workers:.3f} ms"
        table.add_row(str(workers), *cells, each, *ratios, f"{1e3 * first['wall']:.1f} ms")
    Console(width=100).print(table)
    calls = next(iter(found.values()))[1]["calls"]
    print(f"{kind}: a further worker costs {1e3 * slope(found):.3f} ms of CPU a step, for {calls:.0f} calls\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--most", type=int, default=max(REAL), help="most of Ray's workers; 0 leaves them out")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {"simulated": figures(simulated, SIMULATED, TIMES[:1])}
    show("simulated", results["simulated"])
    if sizes := [workers for workers in REAL if workers <= options.most]:
        results["Ray's"] = figures(real, sizes, TIMES)
        show("Ray's", results["Ray's"])
        results["bare"] = bare_figures(sizes)
        show_bare(results["bare"], results["Ray's"])
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
