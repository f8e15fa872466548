"""Processes that a job leaves in order serve the next job of the same pools; those of a failed job serve no more."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_api.spec.deadlines import CALL_SECONDS
from rlhf_mapper.mapping import DeviceMapping, MappedPool
from rlhf_trainer.controller.call_log import CallLog
from rlhf_trainer.controller.worker_group import ModelHandle
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.protocols import ONE_TO_ALL
from rlhf_trainer.run import slots as run_slots
from rlhf_trainer.run.slots import Slots
from rlhf_trainer.types import register

pytestmark = pytest.mark.slow

DEADLINE = float(CALL_SECONDS[1])
"""As of a job: pytest ends sooner what hangs, and a slot may start slowly beside other programs."""


class Lodger:
    """Tells where it lives, draws, and leaves a file when it is closed, which fails where that is there."""

    def __init__(self, name: str, closed: Path) -> None:
        self._name, self._closed = name, closed

    def close(self) -> None:
        self._closed.touch(exist_ok=False)

    @register(ONE_TO_ALL)
    def process(self) -> tuple[str, int]:
        return self._name, os.getpid()

    @register(ONE_TO_ALL)
    def draw(self) -> list[float]:
        drawn: list[float] = torch.rand(2).tolist()
        return drawn


@pytest.fixture
def slots(own_ray: None) -> Iterator[Slots]:  # noqa: ARG001
    made = Slots()
    yield made
    made.release()


def placed_on(pool: str) -> DeviceMapping:
    return DeviceMapping(
        device="CPU", pools=(MappedPool(name=pool, models=("actor",), slots_per_machine=(1,)),), sizes={}
    )


@contextmanager
def job(slots: Slots, name: str, folder: Path, *, pool: str = "all", may_stay: bool = True) -> Iterator[Any]:
    """A job of one model on a pool of one slot."""
    log = CallLog()
    with slots.held(
        placed_on(pool), log=log, deadline=DEADLINE, stacks=folder / "stacks.txt", may_stay=may_stay
    ) as groups:
        groups[pool].build({"actor": WorkerSpec(Lodger, {"name": name, "closed": folder / name})})
        groups[pool].wait_until_built()
        yield ModelHandle(groups[pool], "actor", Lodger)
        log.drain(deadline=DEADLINE)


def process_of(actor: Any, name: str) -> int:
    """The process in which the worker of the job of this name lives."""
    ((told, process),) = actor.process().result()
    assert told == name, "the worker of another job answered"
    return int(process)


def test_the_next_job_finds_the_process_as_if_it_were_new(slots: Slots, tmp_path: Path) -> None:
    with job(slots, "first", tmp_path) as actor:
        first, drawn = process_of(actor, "first"), actor.draw().result()
    assert (tmp_path / "first").exists(), "it was not closed before the next job had its process"
    with suppress(KeyError), job(slots, "second", tmp_path) as actor:
        assert process_of(actor, "second") == first
        assert actor.draw().result() == drawn
        raise KeyError("it fails")
    (tmp_path / "third").touch()
    with job(slots, "third", tmp_path) as actor:
        third = process_of(actor, "third")
    assert third != first, "a job that failed has left its process to another"
    with job(slots, "fourth", tmp_path) as actor:
        fourth = process_of(actor, "fourth")
    assert fourth != third, "a worker that could not be closed is still there"
    with job(slots, "fifth", tmp_path, pool="other", may_stay=False) as actor:
        fifth = process_of(actor, "fifth")
    assert fifth != fourth, "a pool of another name is another pool"
    with job(slots, "sixth", tmp_path, pool="other") as actor:
        assert process_of(actor, "sixth") != fifth


def test_the_first_job_finds_the_prepared_process(
    slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = tmp_path / "prepared"
    monkeypatch.setattr(run_slots, "import_workers", partial(write_process, prepared))
    slots.prepare(placed_on("all"), home="actor", deadline=DEADLINE)
    with job(slots, "first", tmp_path) as actor:
        assert process_of(actor, "first") == int(prepared.read_text())


def write_process(file: Path, *, reads_data: bool) -> None:
    file.write_text(str(os.getpid() * reads_data))
