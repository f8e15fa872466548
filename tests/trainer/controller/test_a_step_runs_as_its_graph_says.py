"""Every algorithm's step on a real Ray, with workers that only give what they declare: calls and bytes of its graph.

The workers of all algorithms live on pools of two and three slots, whose shares of a batch differ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.mapping import DeviceMapping, MappedPool
from rlhf_planning.step_graph import Edge, Graph
from rlhf_trainer.controller.batch import BatchFuture
from rlhf_trainer.controller.call_log import CallLog
from rlhf_trainer.controller.resource_pool import ResourcePool
from rlhf_trainer.controller.worker_group import ModelHandle, WorkerGroup
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.fields import FIELDS, Width
from rlhf_trainer.protocols import blocks
from rlhf_trainer.run.graph import graph_of
from rlhf_trainer.run.step_models import connected, step_models_of
from rlhf_trainer.run.worker_specs import worker_specs
from rlhf_trainer.telemetry import Report, Span, merge
from rlhf_trainer.training.distributed import start
from rlhf_trainer.types import TRANSFER_MARK, Batch, Fields, Transfer
from rlhf_trainer.workers.data import DataShape
from tests.examples.test_every_example_is_right import DISTINCT, FINISHED
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

DEADLINE = float(PATIENCE_SECONDS)
SLOTS = {"left": 2, "right": 3}
SHAPES = {Width.ONE: (), Width.PROMPT: (3,), Width.TEXT: (11,)}
UNKNOWN = {Width.EXPERTS: (11, 4), Width.TOKENS: (11, 6), Width.BYTES: (5,)}
"""Shapes of widths that the plans of these jobs do not know."""
SHAPES |= UNKNOWN
SMALL = ["data.maxPromptTokens=3", "data.maxResponseTokens=8"]
LOADED = [job for path in DISTINCT for job in load(path, SMALL, FINISHED)]
JOBS = {job.name: job for job in LOADED if job.spec.algorithm.name != "Merge"}  # a merge has no steps


def stand_in(spec: WorkerSpec) -> type:
    """A worker with the same marked methods, which add nothing but zeros, as wide as they can be."""
    return type("StandIn", (), {name: standing_in(transfer) for name, transfer in spec.transfers.items()})


def standing_in(transfer: Transfer) -> Any:
    """The method for such a mark; the ranks do not take equally long."""
    added = {name: (FIELDS[name].dtype, SHAPES[FIELDS[name].width]) for name in transfer.adds or ()}

    def call(_: object, batch: Batch, **options: Any) -> Fields:  # noqa: ARG001
        from rlhf_trainer.telemetry import recorder  # that of the process, not a copy sent along with this function

        with recorder.span("stand-in"):
            time.sleep(0.01 * (1 + recorder.rank))
            return {name: torch.zeros((batch.size, *shape), dtype=dtype) for name, (dtype, shape) in added.items()}

    setattr(call, TRANSFER_MARK, transfer)
    return call


def placed(job: Job) -> DeviceMapping:
    """The saved model on the left, and every other one of the rest."""
    others = [role for role in job.models() if role != job.saved]
    return placed_at(job, dict.fromkeys(others[::2], "right"))


def placed_at(job: Job, pool_of: Mapping[str, str]) -> DeviceMapping:
    """The models on these pools, on the left those of which no other is told."""
    pools = tuple(
        MappedPool(
            name=name,
            models=tuple(role for role in job.models() if pool_of.get(role, "left") == name),
            slots_per_machine=(slots,),
        )
        for name, slots in SLOTS.items()
    )
    by_data: dict[str, Any] = {
        "pipeline": 1,
        "tensor": 1,
        "replicas": 1,
        "generation_pipeline": 1,
        "generation_tensor": 1,
    }
    sizes = {role: ParallelSizes(data=pool.size, **by_data) for pool in pools for role in pool.models}
    return DeviceMapping(device="CPU", pools=pools, sizes=sizes)


class Pools:
    """The pools, each with its group."""

    def __init__(self) -> None:
        self.log = CallLog()
        self.slots = [ResourcePool([slots], name=name, device="CPU") for name, slots in SLOTS.items()]
        for pool in self.slots:
            pool.reserve(deadline=DEADLINE)
        self.groups = {
            pool.name: WorkerGroup(
                pool,
                start=partial(start, "CPU", DEADLINE),
                environment={"OMP_NUM_THREADS": "1"},
                log=self.log,
                deadline=DEADLINE,
            )
            for pool in self.slots
        }

    def models(self, job: Job, pool_of: Mapping[str, str]) -> dict[str, Any]:
        """A job's models, on the left pool those of which no other is told."""
        placed = placed_at(job, pool_of)
        folders: dict[Role, str] = dict.fromkeys(get_args(Role), "")
        shape = DataShape(rows=1, total_steps=7, evaluation_rows=0, facts=())
        specs = worker_specs(job, placed, folders, shape, path=Path())
        models: dict[str, Any] = {}
        for pool, name, spec in [(pool, *each) for pool, workers in specs.items() for each in workers.items()]:
            group, role, each = self.groups[pool], f"{job.name}.{name}", stand_in(spec)
            group.build({role: WorkerSpec(each, {})})
            models[name] = ModelHandle(group, role, each)
        for group in self.groups.values():
            group.wait_until_built()
        self.log.drain(deadline=DEADLINE)
        return models

    def stop(self) -> None:
        for group in self.groups.values():
            group.stop()
        for pool in self.slots:
            pool.release()


@pytest.fixture(scope="module")
def pools(own_ray: None) -> Iterator[Pools]:  # noqa: ARG001
    made = Pools()
    yield made
    made.stop()


def run_step(pools: Pools, job: Job, pool_of: Mapping[str, str]) -> list[Report]:
    """Run a step: the reports of each call on each rank, in the order in which they were made, and the controller's."""
    models = pools.models(job, pool_of)
    models = connected(job, models)
    batch = models["data"].load_batch(BatchFuture(step=1, size=job.sequences_per_step))
    job.spec.algorithm.step(batch, **step_models_of(job, models))
    return pools.log.drain(deadline=DEADLINE)


def work_of(graph: Graph, done: list[Report]) -> dict[tuple[int, int], Span]:
    """(number of the call, rank) -> when it worked; `done` holds as many reports a call as its pool has slots."""
    spans: dict[tuple[int, int], Span] = {}
    reports = iter(done)
    for call in graph.calls:
        for rank in range(SLOTS[call.pool]):
            (span,) = [span for span in next(reports).spans if span.phase == "stand-in"]
            assert (span.pool, span.rank) == (call.pool, rank)
            spans[call.number, rank] = span
    assert next(reports, None) is None
    return spans


def dependent(graph: Graph, edge: Edge) -> Iterator[tuple[int, int]]:
    """(rank of the producer, rank of the consumer) for all that have rows in common."""
    made, read = (blocks(graph.rows, SLOTS[graph.calls[end].pool]) for end in (edge.producer, edge.consumer))
    for (producer, theirs), (consumer, mine) in product(enumerate(made), enumerate(read)):
        if max(mine.start, theirs.start) < min(mine.stop, theirs.stop):
            yield producer, consumer


@pytest.mark.parametrize("name", JOBS)
def test_calls_and_bytes_are_those_of_the_graph(pools: Pools, name: str) -> None:
    job = JOBS[name]
    graph = graph_of(job, placed(job))
    *done, _ = run_step(pools, job, {role: pool.name for pool in placed(job).pools for role in pool.models})
    fields = [FIELDS[field.added_as] for each in graph.edges for field in each.fields]
    unknown = [field.dtype.itemsize * math.prod(SHAPES[field.width]) for field in fields if field.width in UNKNOWN]
    assert merge(done)["bytes/transfer"] == graph.bytes + graph.rows * sum(unknown) > 0
    spans = work_of(graph, done)
    for pool, slots in SLOTS.items():
        mine = [call for call in graph.by_level if call.pool == pool]
        assert len({call.level for call in mine}) == len(mine), "one call a level"
        for rank in range(slots):
            times = [moment for call in mine for moment in bounds(spans[call.number, rank])]
            assert times == sorted(times), f"rank {rank} of {pool} runs its calls in the order of their levels"
    for edge in graph.edges:
        assert graph.calls[edge.producer].level < graph.calls[edge.consumer].level
        for producer, consumer in dependent(graph, edge):
            assert spans[edge.producer, producer].end <= spans[edge.consumer, consumer].start, edge


@pytest.mark.parametrize(
    ("on_the_right", "sent"),
    [
        ([], ["left"]),
        (["reward"], ["left", "right", "left", "left"]),
        (["critic"], ["left", "right", "left", "left", "right"]),
    ],
)
def test_ranks_are_sent_at_once_what_they_can_run_without_others(
    pools: Pools, on_the_right: list[str], sent: list[str]
) -> None:
    """All of PPO; or its beginning up to the responses, what does not wait for the other pool, and what does."""
    pools.log = CallLog()  # one in which no other job reads
    for group in pools.groups.values():
        group.take_over(pools.log)
    *_, controller = run_step(pools, JOBS["helpful-ppo"], dict.fromkeys(on_the_right, "right"))
    assert [span.name for span in controller.spans if "send" in span.name] == [f"send to {pool}" for pool in sent]


def bounds(span: Span) -> tuple[float, float]:
    return span.start, span.end


def test_every_field_that_a_worker_adds_is_declared() -> None:
    for job in JOBS.values():
        assert all(call.adds.keys() <= FIELDS.keys() for call in graph_of(job, placed(job)).calls)
