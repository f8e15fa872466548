"""Pools, groups and batches on a real Ray."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_planning.graph_text import text_of
from rlhf_trainer.controller.batch import BatchFuture, PayloadMeter, tensor_bytes
from rlhf_trainer.controller.call_log import CallLog
from rlhf_trainer.controller.graph import ShapeFuture, Tracer
from rlhf_trainer.controller.message import get
from rlhf_trainer.controller.resource_pool import ResourcePool
from rlhf_trainer.controller.worker_group import ModelHandle, WorkerGroup
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.errors import CommunicationError, EnvironmentProblem, NumericsError, TrainerError, user_error
from rlhf_trainer.fields import Width
from rlhf_trainer.run.stopping import Stopped, StopSignals
from rlhf_trainer.telemetry import CONTROLLER, TRANSFER
from rlhf_trainer.training.distributed import start
from tests.patience import PATIENCE_SECONDS
from tests.trainer.controller.probe_workers import WIDTH, NearSink, Sink, Source, Wide

DEADLINE = float(PATIENCE_SECONDS)


class Models:
    """Source and sink on pools of 2 and 1 slots."""

    def __init__(self) -> None:
        self.log = CallLog()
        self.pools = [ResourcePool([2], name="left", device="CPU"), ResourcePool([1], name="right", device="CPU")]
        self.groups = []
        for pool in self.pools:
            pool.reserve(deadline=DEADLINE)
            self.groups.append(
                WorkerGroup(
                    pool,
                    start=partial(start, "CPU", DEADLINE),
                    environment={"OMP_NUM_THREADS": "1"},
                    log=self.log,
                    deadline=DEADLINE,
                )
            )
        left, right = self.groups
        left.build({"source": WorkerSpec(Source, {}), "sink": WorkerSpec(NearSink, {})})
        right.build({"sink": WorkerSpec(Sink, {})})
        for group in self.groups:
            group.wait_until_built()
        self.source: Any = ModelHandle(left, "source", Source)
        self.near: Any = ModelHandle(left, "sink", NearSink)
        self.far: Any = ModelHandle(right, "sink", Sink)

    def stop(self) -> None:
        for group in self.groups:
            group.stop()
        for pool in self.pools:
            pool.release()


@pytest.fixture(scope="module")
def models(own_ray: None) -> Iterator[Models]:  # noqa: ARG001
    made = Models()
    yield made
    made.stop()


def values_of(future: Any) -> list[Any]:
    """What a call gives, or its own error, where waiting would find that of an earlier call first."""
    for group in future.log.groups:
        group.send()
    return get([part[0].ended for part in future.parts], deadline=DEADLINE)


@pytest.mark.slow
def test_ranks_follow_torchruns_contract(models: Models) -> None:
    assert models.source.rank().result() == [0, 1]


def test_rows_of_two_producers_reach_one_consumer_padded(models: Models) -> None:
    batch = models.source.make(BatchFuture(step=1, size=5))
    ((start_row, shape, sums),) = models.far.read_ragged(batch).result()
    assert (start_row, shape) == (0, [5, 5])  # rank 0 held rows 0-2, 3 wide; rank 1 rows 3-4, 5 wide
    assert sums == [0 * 3, 1 * 3, 2 * 3, 3 * 5, 4 * 5]


def test_fields_go_there_and_back_between_pools(models: Models) -> None:
    batch = models.source.make(BatchFuture(step=1, size=5))
    batch = models.source.make_slowly(batch, seconds=0.0)
    batch = models.far.add(batch)
    assert models.near.read_sum(batch).result() == [[0, 11, 22], [33, 44]]


def test_a_call_waits_only_for_the_fields_it_reads(models: Models) -> None:
    batch = models.source.make(BatchFuture(step=1, size=4))
    models.far.read_number(batch).result()
    called = time.time()
    slow = models.source.make_slowly(batch, seconds=3.0)
    returned = time.time()
    reading = models.far.read_number(slow)  # needs `number` only, while `slow` is still being made
    added = models.far.add(slow)
    ((_, read_at),) = reading.result()
    total = models.far.read_sum(added).result()
    done = time.time()
    assert total == [[0, 11, 22, 33]]
    assert done - called >= 3.0, "reading `slow` had to wait for it"
    assert returned < read_at < called + 3.0, "reading `number` did not wait for `slow`"
    spans = [span for report in models.log.drain(deadline=DEADLINE) for span in report.spans]
    fetched = [span for span in spans if span.name == "sink.add: fetch" and span.start > called]
    waited = max(fetched, key=lambda span: span.end - span.start)
    assert called < waited.start < called + 3.0 < waited.end < done, "the timeline shows the wait"


def test_no_payload_passes_through_the_controller(models: Models) -> None:
    meter = PayloadMeter()
    with meter.watching():
        batch = models.source.make(BatchFuture(step=1, size=400))
        batch = models.source.make_slowly(batch, seconds=0.0)
        batch = models.far.add(batch)
        models.near.read_sum(batch).result()
        models.log.drain(deadline=DEADLINE)
        assert meter.read() == 0


def test_the_meter_sees_payload_that_does_pass(models: Models) -> None:
    batch = models.source.make(BatchFuture(step=1, size=400))
    meter = PayloadMeter()
    with meter.watching():
        ray.get(batch.fields["number"].blocks[0].reference)
        assert meter.read() == 200 * 8
        reference = ray.put({"inside": [torch.zeros(10, dtype=torch.float32)]})
        assert meter.read() == 40
        del reference
    ray.get(batch.fields["number"].blocks[0].reference)
    assert meter.read() == 0, "it counts only while it watches"


def test_tensors_are_found_wherever_they_hide() -> None:
    batch = {"a": [torch.zeros(3), (torch.zeros(2, dtype=torch.int64).numpy(), "text")], "b": 5}
    assert tensor_bytes(batch) == 12 + 16


def test_a_workers_own_error_arrives_as_itself(models: Models) -> None:
    with pytest.raises(NumericsError, match="the loss is nan"):
        models.source.fail().result()
    with pytest.raises(NumericsError):
        models.log.drain(deadline=DEADLINE)


def test_a_call_that_reads_a_failed_field_has_its_error(models: Models) -> None:
    batch = models.source.make_in_vain(BatchFuture(step=1, size=4))
    reading = models.far.read_number(batch)
    with pytest.raises(NumericsError, match="the loss of 2 rows is nan"):
        values_of(reading)
    with pytest.raises(NumericsError):
        models.log.drain(deadline=DEADLINE)


def test_what_a_process_makes_for_itself_never_leaves_it(models: Models) -> None:
    """`double` is read by the left pool only, `number` by the right one too."""
    batch = models.near.double(models.source.make(BatchFuture(step=1, size=5)))
    assert batch.fields["double"].blocks == []
    assert batch.fields["number"].blocks != []
    assert models.near.read_double(batch).result() == [[0, 2, 4], [6, 8]]
    models.source.make(BatchFuture(step=2, size=5))
    with pytest.raises(TrainerError, match="double was added in another step"):
        models.near.read_double(batch).result()  # only what was made in this step is kept
    with pytest.raises(TrainerError):
        models.log.drain(deadline=DEADLINE)


def test_a_call_that_reads_its_own_failure_has_its_error(models: Models) -> None:
    batch = models.near.double_in_vain(models.source.make(BatchFuture(step=1, size=4)))
    reading = models.near.read_double(batch)
    with pytest.raises(NumericsError, match="the double of 2 rows is nan"):
        values_of(reading)
    with pytest.raises(NumericsError):
        models.log.drain(deadline=DEADLINE)


def test_calls_after_one_that_failed_do_not_run_and_say_why(models: Models) -> None:
    batch = models.near.double_in_vain(models.source.make(BatchFuture(step=1, size=4)))
    doubled = models.near.double(batch)
    with pytest.raises(NumericsError, match="the double of 2 rows is nan"):
        models.near.read_double(doubled).result()
    with pytest.raises(NumericsError, match="the double of 2 rows is nan"):
        values_of(models.near.read_double(doubled))  # another message, whose fields an earlier one was to make
    with pytest.raises(NumericsError):
        models.log.drain(deadline=DEADLINE)
    models.near.read_double(models.near.double(models.source.make(BatchFuture(step=2, size=4)))).result()


def test_calls_are_timed_by_phase_and_transfer(models: Models) -> None:
    models.log.drain(deadline=DEADLINE)
    batch = models.source.make(BatchFuture(step=1, size=4))
    models.near.read_number(batch).result()
    spans = [span for report in models.log.drain(deadline=DEADLINE) for span in report.spans]
    assert {(span.pool, span.rank, span.phase) for span in spans} == {
        ("left", 0, "data"),
        ("left", 1, "data"),
        ("left", 0, TRANSFER),
        ("left", 1, TRANSFER),
        ("", 0, CONTROLLER),
    }
    controller = [span.name for span in spans if span.phase == CONTROLLER]
    sent_with_what_others_read = ["send to left", "dispatch source.make"]
    sent_when_somebody_waits = ["dispatch sink.read_number", "send to left", "wait for 4 calls"]
    assert controller == sent_with_what_others_read + sent_when_somebody_waits


def test_a_signal_is_heard_while_ranks_work(models: Models, tmp_path: Path) -> None:
    """Ray by itself would raise what the handler raised only when a rank has ended: here, never."""
    file = tmp_path / "heard"
    models.source.wait_for(file=str(file))

    def wait() -> None:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        models.log.drain(deadline=DEADLINE)

    try:
        with StopSignals(lambda message: None).handled(), pytest.raises((Stopped, SystemError)) as raised:
            wait()
    finally:
        file.touch()
    assert isinstance(user_error(raised.value), Stopped)
    models.log.drain(deadline=DEADLINE)


ROWS = 6


def test_ranks_read_the_bytes_that_the_graph_prints(models: Models) -> None:
    """Rows, or addends, of two tensor ranks go to one rank of the other pool, and its scores to both."""
    specs = {
        "left": WorkerSpec(Wide, {}, ParallelSizes(data=1, tensor=2)),
        "right": WorkerSpec(Wide, {}, ParallelSizes(data=1)),
    }
    tracer = Tracer(rows=ROWS, widths={Width.ONE: 1, Width.TEXT: WIDTH})
    drawn, real = dict[str, Any](), dict[str, Any]()
    for group in models.groups:
        spec = specs[group.name]
        drawn[group.name] = tracer.model(group.name, spec, group.name, spec.layout or group.layout)
        real[group.name] = group.build({"wide": spec})["wide"]
        group.wait_until_built()
    models.log.drain(deadline=DEADLINE)
    for parts, blank in ((drawn, ShapeFuture()), (real, BatchFuture(step=1, size=ROWS))):
        for made in (parts["left"].make(blank), parts["left"].make_addends(blank)):
            parts["left"].read(parts["right"].score(made))
    graph, reports = tracer.graph(), iter(models.log.drain(deadline=DEADLINE))
    for call in graph.calls:
        ranks = 2 if call.pool == "left" else 1
        measured = sum(next(reports).sums.get("bytes/transfer", 0) for _ in range(ranks))
        assert measured == sum(edge.bytes for edge in graph.edges if edge.consumer == call.number)
    spreads = ["S(0)/1", "S(0)/1, B*2 tensor", "S(0)/1, P+2 tensor", "S(0)/1, B*2 tensor"]
    printed = [line.split("  ")[1:] for line in text_of(graph, title="").splitlines() if " -> " in line]
    expected = [[spread, f"{edge.bytes:,}"] for spread, edge in zip(spreads, graph.edges, strict=True)]
    assert [[cell.strip() for cell in cells if cell][:2] for cells in printed] == expected


@pytest.mark.usefixtures("own_ray")
def test_a_pool_that_ray_cannot_hold_is_one_sentence() -> None:
    pool = ResourcePool([64], name="huge", device="CPU")
    with pytest.raises(EnvironmentProblem, match="pool huge needs 64 CPU slots, but Ray has"):
        pool.reserve(deadline=2)


def test_a_dead_worker_is_an_error_for_all_who_wait(models: Models) -> None:
    lonely = ResourcePool([1], name="lonely", device="CPU")
    lonely.reserve(deadline=DEADLINE)
    log = CallLog()
    log.readers = models.log.readers  # they are one run
    group = WorkerGroup(lonely, start=partial(start, "CPU", DEADLINE), environment={}, log=log, deadline=DEADLINE)
    group.build({"source": WorkerSpec(Source, {})})
    group.wait_until_built()
    dying: Any = ModelHandle(group, "source", Source)
    reading = models.far.read_number(dying.make_and_die(BatchFuture(step=1, size=4)))
    for lost in (dying.rank(), reading):
        with pytest.raises(CommunicationError, match="a worker was lost"):
            values_of(lost)
    with pytest.raises(CommunicationError, match="a worker was lost"):
        models.log.drain(deadline=DEADLINE)
    lonely.release()
