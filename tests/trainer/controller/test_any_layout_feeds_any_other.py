"""Edges between groups of any p-t-d on a real Ray: each rank fetches its rows and no more (HybridFlow, Figure 5(b))."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.controller.batch import BatchFuture, PayloadMeter
from rlhf_trainer.controller.call_log import CallLog
from rlhf_trainer.controller.graph import ShapeFuture, Tracer
from rlhf_trainer.controller.resource_pool import ResourcePool
from rlhf_trainer.controller.worker_group import ModelHandle, WorkerGroup
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.fields import Width
from rlhf_trainer.meeting import Meeting
from rlhf_trainer.protocols import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_TO_ALL,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_ONLY,
    THREE_D_PROTO,
    AxisPlacement,
    TransferProtocol,
    sbp_protocol,
)
from rlhf_trainer.telemetry import TRANSFER
from rlhf_trainer.types import Batch, Fields, register
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

DEADLINE = float(PATIENCE_SECONDS)
WIDTH = 16
ROW_BYTES = WIDTH * 8
PARTIAL = sbp_protocol(
    "PARTIAL",
    takes={"data": AxisPlacement.SPLIT},
    gives={"data": AxisPlacement.SPLIT, "pipeline": AxisPlacement.LAST, "tensor": AxisPlacement.PARTIAL},
)
ACTOR = ParallelSizes(pipeline=1, tensor=2, data=3, generation_tensor=1)
CRITIC = ParallelSizes(pipeline=2, tensor=1, data=2)
LAYOUTS = {"actor": ACTOR, "critic": CRITIC}


def backwards(layout: ParallelSizes, rows: int) -> list[range]:
    """A user's protocol: the last rank has the first rows."""
    return DP_PROTO.distribute(layout, rows)[::-1]


BACKWARDS = TransferProtocol(
    name="BACKWARDS",
    distribute=backwards,
    collect=lambda layout: [(rank,) for rank in reversed(range(layout.world_size))],
)


def rank_here(_: Meeting | None = None) -> int:
    """No collective is needed here, so there is no process group."""
    return int(os.environ["RANK"])


def numbers(batch: Batch) -> torch.Tensor:
    """The number of each row, [B, WIDTH] int64."""
    return batch.rows[:, None].repeat(1, WIDTH)


class Producer:
    """A model of any layout, whose rank p-1, t=0 alone has the output."""

    def __init__(self, layout: ParallelSizes) -> None:
        self._where = layout.coordinates(rank_here())
        self._notes: list[int] = []
        self._is_last = self._where["pipeline"] == layout.pipeline - 1

    @register(THREE_D_PROTO, adds=("tokens",))
    def forward(self, batch: Batch) -> Fields:
        return {"tokens": numbers(batch)} if self._is_last else {}

    @register(THREE_D_ALL_MICRO_DP, adds=("written",))
    def generate(self, batch: Batch) -> Fields:
        return {"written": numbers(batch)}

    @register(PARTIAL, adds=("added",))
    def partial_sums(self, batch: Batch) -> Fields:
        return {"added": numbers(batch) * (self._where["tensor"] + 1)}

    @register(BACKWARDS, adds=("mirrored",))
    def mirror(self, batch: Batch) -> Fields:
        return {"mirrored": numbers(batch)}

    @register(ALL_TO_ALL, adds=("own",))
    def own(self, batch: Batch) -> Fields:
        return {"own": numbers(batch) + 100 * rank_here()}

    @register(ONE_TO_ALL, adds=("twice",))
    def broken(self, batch: Batch) -> Fields:
        return {"twice": numbers(batch)}

    @register(THREE_D_PP_ONLY)
    def stage(self) -> int:
        return self._where["pipeline"]

    @register(PARTIAL)
    def count(self) -> int:
        return 1

    @register(ONE_TO_ALL)
    def note(self, *, number: int) -> list[int]:
        """All that this rank was told so far, in order."""
        self._notes.append(number)
        return list(self._notes)

    @register(ONE_TO_ALL)
    def wait_for(self, *, path: str) -> None:
        """Return when the file is there."""
        while not Path(path).exists():
            time.sleep(0.01)

    @register(ONE_TO_ALL)
    def make(self, *, path: str) -> None:
        Path(path).touch()


class Consumer(Producer):
    """The same, and reads; returns (first row, the numbers of the rows)."""

    @register(THREE_D_PROTO, reads=("tokens",))
    def read_tokens(self, batch: Batch) -> tuple[int, list[int]]:
        assert batch["tokens"].shape == (batch.size, WIDTH)
        return batch.start, batch["tokens"][:, -1].tolist()

    @register(DP_PROTO, reads=("written", "added", "mirrored"))
    def read_all(self, batch: Batch) -> tuple[int, list[list[int]]]:
        return batch.start, [batch[name][:, 0].tolist() for name in ("written", "added", "mirrored")]

    @register(ALL_TO_ALL, reads=("own",))
    def read_own(self, batch: Batch) -> list[int]:
        return batch["own"][:, 0].tolist()


class Models:
    """Groups on pools of their own."""

    def __init__(self, layouts: dict[str, ParallelSizes]) -> None:
        self.log = CallLog()
        self.pools, self.groups = [], []
        self.models: dict[str, Any] = {}
        for name, layout in layouts.items():
            pool = ResourcePool([layout.world_size], name=name, device="CPU")
            pool.reserve(deadline=DEADLINE)
            self.pools.append(pool)
            group = WorkerGroup(pool, start=rank_here, environment={}, log=self.log, deadline=DEADLINE, layout=layout)
            group.build({"model": WorkerSpec(Consumer, {"layout": layout})})
            self.groups.append(group)
            self.models[name] = ModelHandle(group, "model", Consumer)
        for group in self.groups:
            group.wait_until_built()
        self.log.drain(deadline=DEADLINE)

    def fetched(self, pool: str) -> list[float]:
        """Bytes that each rank of a pool has fetched since the last call."""
        by_rank: dict[int, float] = {}
        for report in self.log.drain(deadline=DEADLINE)[:-1]:
            for span in report.spans:
                if (span.pool, span.phase) == (pool, TRANSFER):
                    by_rank[span.rank] = by_rank.get(span.rank, 0) + report.sums.get("bytes/transfer", 0)
        return [by_rank[rank] for rank in sorted(by_rank)]

    def stop(self) -> None:
        for group in self.groups:
            group.stop()
        for pool in self.pools:
            pool.release()


@pytest.fixture(scope="module")
def models(own_ray: None) -> Iterator[Models]:  # noqa: ARG001
    made = Models(LAYOUTS)
    yield made
    made.stop()


def blank(rows: int) -> BatchFuture:
    return BatchFuture(step=1, size=rows)


def together(parts: Sequence[tuple[int, list[int]]]) -> list[int]:
    """The rows of all parts, which must follow one another."""
    rows: list[int] = []
    for start, part in parts:
        assert start == len(rows)
        rows += part
    return rows


@pytest.mark.parametrize(("source", "target", "d"), [("actor", "critic", 2), ("critic", "actor", 3)])
@pytest.mark.parametrize("rows", [12, 7, 1])
def test_each_consumer_fetches_its_share_and_no_more(
    models: Models, source: str, target: str, d: int, rows: int
) -> None:
    """Actor (1,2,3) -> critic (2,1,2), and back; 7 rows divide by neither, and 1 row leaves ranks without any."""
    models.fetched(target)
    batch = models.models[source].forward(blank(rows))
    parts = models.models[target].read_tokens(batch).result()
    assert together(parts) == list(range(rows))
    shares = THREE_D_PROTO.distribute(LAYOUTS[target], rows)
    fetched = models.fetched(target)
    assert fetched == [len(share) * ROW_BYTES for share in shares]
    assert max(fetched) == -(-rows // d) * ROW_BYTES
    assert sum(fetched) == traced_bytes(source, target, rows)


def traced_bytes(source: str, target: str, rows: int) -> int:
    """What the graph of these two calls says."""
    tracer = Tracer(rows=rows, widths={Width.TEXT: WIDTH})
    spec = WorkerSpec(Consumer, {})
    producer, consumer = (tracer.model(name, spec, name, LAYOUTS[name]) for name in (source, target))
    consumer.read_tokens(producer.forward(ShapeFuture()))
    return tracer.graph().bytes


def test_the_controller_holds_none_of_it(models: Models) -> None:
    with PayloadMeter().watching() as meter:
        models.models["critic"].read_tokens(models.models["actor"].forward(blank(12))).result()
        models.log.drain(deadline=DEADLINE)
        assert meter.read() == 0


def test_micro_replicas_sums_and_own_protocols_reach_a_reader(models: Models) -> None:
    batch = models.models["actor"].generate(blank(7))
    batch = models.models["actor"].partial_sums(batch)
    batch = models.models["critic"].mirror(batch)
    rows = list(range(7))
    parts = models.models["critic"].read_all(batch).result()
    written, added, mirrored = ([row for _, part in parts for row in part[field]] for field in range(3))
    assert written == rows
    assert added == [row + 2 * row for row in rows], "the addends of both tensor ranks"
    assert mirrored == rows


def test_values_come_from_the_ranks_that_a_protocol_collects(models: Models) -> None:
    assert models.models["critic"].stage().result() == [0, 1]
    assert models.models["actor"].stage().result() == [0]
    assert models.models["actor"].count().result() == [2, 2, 2]


def test_all_to_all_takes_a_batch_for_each_rank(models: Models) -> None:
    batches = [blank(rank + 1) for rank in range(CRITIC.world_size)]
    batches = models.models["critic"].own(batches)
    expected = [[100 * rank + row for row in range(rank + 1)] for rank in range(CRITIC.world_size)]
    assert models.models["critic"].read_own(batches).result() == expected
    with pytest.raises(ValueError, match=r"model\.own: ALL_TO_ALL needs a batch for each of 4 ranks"):
        models.models["critic"].own(batches[:2])


def test_a_protocol_that_gives_rows_twice_can_add_no_field(models: Models) -> None:
    with pytest.raises(ValueError, match=r"model\.broken: ONE_TO_ALL does not give each row once"):
        models.models["actor"].broken(blank(4))


def test_calls_on_one_pool_run_in_their_order(models: Models) -> None:
    calls = [models.models["actor"].note(number=number) for number in range(20)]
    assert calls[-1].result() == [list(range(20))] * ACTOR.world_size


def test_calls_on_different_pools_run_at_the_same_time(models: Models, tmp_path: Path) -> None:
    """Else the first would wait for ever for what the second makes."""
    waiting = models.models["actor"].wait_for(path=str(tmp_path / "made"))
    models.models["critic"].make(path=str(tmp_path / "made")).result()
    assert waiting.result() == [None] * ACTOR.world_size
