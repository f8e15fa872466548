"""Rows that have ended are scored in another pool before the call that makes them has ended, on a real Ray."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_api.spec.rollout import stream_groups
from rlhf_trainer.controller.batch import BatchFuture
from rlhf_trainer.controller.call_log import CallLog
from rlhf_trainer.controller.resource_pool import ResourcePool
from rlhf_trainer.controller.worker_group import ModelHandle, WorkerGroup
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.errors import NumericsError
from rlhf_trainer.protocols import DP_PROTO
from rlhf_trainer.row_groups import Outlet, RowGroup
from rlhf_trainer.run.step_models import StreamingRollout, with_calls
from rlhf_trainer.training.distributed import start
from rlhf_trainer.types import Batch, Fields, register
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

DEADLINE = float(PATIENCE_SECONDS)
ROWS = 37


class Writer:
    """Writes rows from the last one to the first, and then waits until one of them was scored."""

    @register(DP_PROTO, adds=("valid",))
    def load(self, batch: Batch) -> Fields:
        return {"valid": (batch.rows % 2).float()}

    @register(DP_PROTO, adds=("tokens",), in_groups=True)
    def generate_sequences(
        self, batch: Batch, *, scored: str = "", breaks: bool = False, outlet: Outlet | None = None
    ) -> Fields:
        """tokens [B, 5]: the row, as often as its number's remainder by five says, at least once."""
        lengths = batch.rows % 5 + 1
        tokens = batch.rows[:, None] * (torch.arange(5) < lengths[:, None])
        if outlet is None:
            return {"tokens": tokens}
        parts = stream_groups(batch.size)
        for number, part in enumerate(parts):
            if part is parts[-1]:
                if breaks:
                    raise NumericsError("the last rows are nan")
                until(Path(scored).exists)
            rows = torch.arange(batch.size).flip(0)[part.start : part.stop]
            width = int(lengths[rows].max()) if len(rows) else 1
            last = 5 if part is parts[-1] else 0
            outlet.put(number, RowGroup(rows=batch.rows[rows], fields={"tokens": tokens[rows, :width]}, width=last))
        return {"tokens": tokens}


class Reader:
    """Scores rows."""

    @register(DP_PROTO, reads=("tokens", "valid"), adds=("doubles", "sums"), row_by_row=True)
    def score(self, batch: Batch) -> Fields:
        """doubles [B, T] and sums [B], 0 where the row is not valid."""
        with Path(SCORED).open("a") as mark:  # as other ranks do at the same time
            mark.write(f"{batch.size} ")
        doubles = batch["tokens"] * 2 * batch["valid"][:, None]
        return {"doubles": doubles, "sums": doubles.sum(1)}

    @register(DP_PROTO, reads=("tokens", "doubles", "sums"))
    def read(self, batch: Batch) -> list[list[float]]:
        assert batch["doubles"].shape == batch["tokens"].shape
        return [row.tolist() for row in torch.cat([batch["doubles"], batch["sums"][:, None]], 1)]


SCORED = "/dev/shm/rlhf-test-scored"


def until(holds: Any) -> None:
    for _ in range(int(DEADLINE * 100)):
        if holds():
            return
        time.sleep(0.01)
    raise TimeoutError("no row was scored while others were being written")


class Pools:
    """A writer of some slots and a reader of some, and the actor that streams."""

    def __init__(self, writers: int, readers: int) -> None:
        self.log, self.groups, self.pools = CallLog(), [], []
        for name, slots in (("left", writers), ("right", readers)):
            pool = ResourcePool([slots], name=name, device="CPU")
            pool.reserve(deadline=DEADLINE)
            began = partial(start, "CPU", DEADLINE)
            threads = {"OMP_NUM_THREADS": "1"}
            self.groups.append(WorkerGroup(pool, start=began, environment=threads, log=self.log, deadline=DEADLINE))
            self.pools.append(pool)
        left, right = self.groups
        left.build({"actor": WorkerSpec(Writer, {})})
        right.build({"reader": WorkerSpec(Reader, {})})
        for group in self.groups:
            group.wait_until_built()
        self.writer: Any = ModelHandle(left, "actor", Writer)
        self.reader: Any = ModelHandle(right, "reader", Reader)
        self.log.streams.are_on = True
        scorers = [[("reader", "score")]]
        models = {"reader": self.reader}
        rollout = StreamingRollout(partial(self.writer.call, "generate_sequences"), models, scorers, self.log.streams)
        self.actor: Any = with_calls(self.writer, generate_sequences=rollout.generate_sequences)

    def stop(self) -> None:
        for group, pool in zip(self.groups, self.pools, strict=True):
            group.stop()
            pool.release()


@pytest.fixture(scope="module", params=[(1, 1), (2, 3)], ids=str)
def pools(own_ray: None, request: pytest.FixtureRequest) -> Iterator[Pools]:  # noqa: ARG001
    made = Pools(*request.param)
    yield made
    made.stop()


@pytest.fixture
def scored() -> Iterator[Path]:
    mark = Path(SCORED)
    mark.unlink(missing_ok=True)
    yield mark
    mark.unlink(missing_ok=True)


@pytest.mark.parametrize("rows", [ROWS, 3])
def test_a_row_is_scored_while_others_are_written(pools: Pools, scored: Path, rows: int) -> None:
    """Else the writer would wait for it in vain. With fewer rows than groups, some groups are empty."""
    batch = pools.actor.load(BatchFuture(step=rows, size=rows))
    batch = pools.actor.generate_sequences(batch, scored=str(scored))
    batch = pools.reader.score(batch)
    found = [row for rank in pools.reader.read(batch).result() for row in rank]
    assert found == [expected(row, width=5) for row in range(rows)]
    assert sum(map(int, scored.read_text().split())) == rows, "each row was scored once"
    pools.log.drain(deadline=DEADLINE)


def expected(row: int, *, width: int) -> list[float]:
    doubles = [2.0 * row * (row % 2) * (place < row % 5 + 1) for place in range(width)]
    return [*doubles, sum(doubles)]


def test_an_evaluation_does_not_stream(pools: Pools, scored: Path) -> None:
    batch = pools.actor.generate_sequences(pools.actor.load(BatchFuture(step=0, size=5)))
    assert len([row for rank in pools.reader.read(pools.reader.score(batch)).result() for row in rank]) == 5
    assert sum(map(int, scored.read_text().split())) == 5
    pools.log.drain(deadline=DEADLINE)


def test_an_error_of_the_writer_is_the_readers_too(pools: Pools, scored: Path) -> None:
    batch = pools.actor.generate_sequences(pools.actor.load(BatchFuture(step=99, size=ROWS)), breaks=True)
    pools.reader.read(pools.reader.score(batch))
    with pytest.raises(NumericsError, match="the last rows are nan"):
        pools.log.drain(deadline=DEADLINE)
    assert scored.exists(), "the first ones were scored"
