"""Two ranks on a real Ray: when one hangs or dies the error says which and in what, and the stacks show where."""

import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from rlhf_trainer.controller.batch import BatchFuture
from rlhf_trainer.controller.call_log import CallLog
from rlhf_trainer.controller.diagnosis import diagnose
from rlhf_trainer.controller.resource_pool import ResourcePool
from rlhf_trainer.controller.worker_group import ModelHandle, WorkerGroup
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.errors import CommunicationError
from rlhf_trainer.protocols import DP_PROTO, ONE_TO_ALL
from rlhf_trainer.training.distributed import start
from rlhf_trainer.types import Batch, Fields, register
from tests.patience import PATIENCE_SECONDS

FOREVER = 1000


class Faulty:
    """A worker whose rank 1 fails, while rank 0 waits for it in a collective."""

    @register(ONE_TO_ALL)
    def quick(self) -> None:
        """Both ranks are well."""
        dist.all_reduce(torch.ones(1))

    @register(DP_PROTO, adds=("number",))
    def make(self, batch: Batch) -> Fields:
        """For a call that never comes to it."""
        return {"number": batch.rows}

    @register(DP_PROTO, reads=("number",))
    def read(self, batch: Batch) -> int:
        """For one whose fields are never made."""
        return batch.size

    @register(ONE_TO_ALL)
    def nap(self, *, seconds: float) -> None:
        """Takes a while, and nobody fails."""
        time.sleep(seconds)

    @register(ONE_TO_ALL)
    def oversleep(self) -> None:
        if dist.get_rank() == 1:
            time.sleep(FOREVER)
        dist.all_reduce(torch.ones(1))

    @register(ONE_TO_ALL)
    def die(self) -> None:
        if dist.get_rank() == 1:
            psutil.Process().kill()
        dist.all_reduce(torch.ones(1))

    @register(ONE_TO_ALL)
    def freeze(self) -> None:
        if dist.get_rank() == 1:
            psutil.Process().suspend()
            time.sleep(FOREVER)  # another thread may take the signal, and this one go on for a moment
        dist.all_reduce(torch.ones(1))

    @register(ONE_TO_ALL)
    def wait_for_nobody(self) -> None:
        """The ranks wait for each other in collectives that do not match."""
        if dist.get_rank() == 0:
            dist.recv(torch.ones(1), src=1)
        dist.recv(torch.ones(1), src=0)


class Group:
    """A pool of two ranks with the worker, whose calls have a deadline of a few seconds once it is built."""

    def __init__(self, *, deadline: float, collective: float) -> None:
        self.log = CallLog()
        self.pool = ResourcePool([2], name="left", device="CPU")
        self.pool.reserve(deadline=PATIENCE_SECONDS)
        self.group = WorkerGroup(
            self.pool, start=partial(start, "CPU", collective), environment={}, log=self.log, deadline=60
        )
        self.group.build({"actor": WorkerSpec(Faulty, {})})
        self.group.wait_until_built()
        actor: Any = ModelHandle(self.group, "actor", Faulty)
        actor.quick().result()
        self.actor = actor
        self.deadline = deadline
        self.processes = [psutil.Process(number) for number in self.group._processes]

    def stop(self) -> None:
        self.group.stop()
        self.pool.release()


def error_of(group: Group, method: str, stacks: Path, *, is_blamed: bool = True) -> tuple[str, str]:
    """(sentence, stacks) of the error in which a call ends that others wait for."""
    getattr(group.actor, method)()
    group.actor.read(group.actor.make(BatchFuture(step=1, size=4)))
    with pytest.raises(CommunicationError) as raised:
        group.log.drain(deadline=group.deadline)
    found = diagnose(raised.value, group.group.inspect(), stacks)
    assert found.host == (socket.gethostname() if is_blamed else "")
    return str(found), stacks.read_text()


@pytest.fixture
def group(own_ray: None) -> Iterator[Group]:  # noqa: ARG001
    made = Group(deadline=3, collective=60)
    yield made
    made.stop()
    _, alive = psutil.wait_procs(made.processes, timeout=PATIENCE_SECONDS)
    assert not alive, "a rank lingers"


@pytest.mark.slow
def test_the_rank_that_hangs_is_named_not_the_one_that_waits(group: Group, tmp_path: Path) -> None:
    """Before that, calls that are sent together take longer than the deadline of one, and nobody hangs."""
    for _ in range(3):
        group.actor.nap(seconds=0.6 * group.deadline)
    group.log.drain(deadline=group.deadline)
    group.actor.nap(seconds=0.6 * group.deadline)
    sentence, stacks = error_of(group, "oversleep", tmp_path / "stacks.txt")
    first, second = (f"rank {rank} of pool left, process {group.processes[rank].pid}" for rank in (0, 1))
    assert sentence.startswith(f"no call of a worker ended within 3 s; {second} is in actor.oversleep ({__file__}:"), (
        sentence
    )
    assert sentence.endswith(f"oversleep); {first} waits for it; the stacks of all ranks are in {tmp_path}/stacks.txt")
    assert "time.sleep(FOREVER)" in stacks
    assert "dist.all_reduce(torch.ones(1))" in stacks


def test_a_dead_rank_is_named_at_once_and_no_other_lingers(group: Group, tmp_path: Path) -> None:
    group.deadline = FOREVER  # the test would end in a timeout if it were waited for
    sentence, _ = error_of(group, "die", tmp_path / "stacks.txt")
    assert (
        f"; rank 1 of pool left, process {group.processes[1].pid} died in one of 3 calls from actor.die to actor.read; "
        in (sentence)
    )


@pytest.mark.slow
def test_a_rank_whose_process_is_stuck_does_not_answer(group: Group, tmp_path: Path) -> None:
    sentence, stacks = error_of(group, "freeze", tmp_path / "stacks.txt")
    name = f"rank 1 of pool left, process {group.processes[1].pid} does not answer in one of 3 calls"
    name += " from actor.freeze to actor.read"
    assert f"; {name}; rank 0 of pool left" in sentence
    assert f"=== {name}\nno answer" in stacks


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_are_all_named(group: Group, tmp_path: Path) -> None:
    sentence, _ = error_of(group, "wait_for_nobody", tmp_path / "stacks.txt", is_blamed=False)
    for process in group.processes:
        assert f"process {process.pid} is in actor.wait_for_nobody" in sentence


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
def test_the_rank_whose_collective_ran_out_of_time_is_not_blamed(tmp_path: Path) -> None:
    """gloo gives up before the controller does: the error comes from the innocent rank."""
    group = Group(deadline=60, collective=4)
    try:
        sentence, _ = error_of(group, "oversleep", tmp_path / "stacks.txt")
    finally:
        group.stop()
    assert sentence.startswith("actor.oversleep on rank 0: "), sentence
    assert f"; rank 1 of pool left, process {group.processes[1].pid} is in actor.oversleep (" in sentence
