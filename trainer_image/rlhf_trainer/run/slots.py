"""The slots of a run: pools, and a process in each slot, which a job may take over from the job before it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import ray

from rlhf_api.names import Role
from rlhf_mapper.mapping import Device, DeviceMapping
from rlhf_trainer.controller.diagnosis import diagnose
from rlhf_trainer.controller.resource_pool import BesidePool, ResourcePool, threads_of
from rlhf_trainer.controller.worker_group import CallLog, WorkerGroup
from rlhf_trainer.errors import CommunicationError, TrainerError
from rlhf_trainer.run.session import how_ray_ended
from rlhf_trainer.run_folder.attempt import own_attempt

COLLECTIVE_DEADLINES = 2
"""How many deadlines a collective may take: the controller, which can see who is to blame, gives up first."""
POOL_DEADLINE_SECONDS = 300.0
"""How long Ray may take to set a pool's slots aside."""
HEAP = {"MALLOC_MMAP_THRESHOLD_": str(4 * 2**20)}
"""Memory of so many bytes goes back to the system when a tensor is freed.

By itself glibc soon keeps all that is smaller than 32 MiB, which the weights of a layer are, in heaps full of holes.
"""

THREADS = "OMP_NUM_THREADS"
WAITING = {"GOMP_SPINCOUNT": "1000"}
"""Looks of a waiting thread before it gives its core away: some microseconds.

By itself OpenMP looks for milliseconds. Beside other programs one of the others waits for just that core, and a step
takes many times as long; without looking at all, each wait costs a wake-up.
"""


class Slots:
    """A worker group for each pool of a job; one job at a time."""

    def __init__(self) -> None:
        self._like: object = None
        """Device, deadline and pools of the processes that are there."""
        self._pools: list[ResourcePool] = []
        self._groups: dict[str, WorkerGroup] = {}

    def prepare(self, placed: DeviceMapping, *, home: Role, deadline: float) -> None:
        """Start the processes of the first job, which import what ranks need while the controller does the same.

        home: the model beside which the data is read. What fails here fails again in `held`, where it is recorded.
        """
        self._like = likeness(placed, deadline)
        with suppress(TrainerError):
            self._start(placed, CallLog(), deadline)
            for pool in placed.pools:
                self._groups[pool.name].prepare(import_workers_and_data if home in pool.models else import_workers)
            return
        self.release()

    @contextmanager
    def held(
        self, placed: DeviceMapping, *, log: CallLog, deadline: float, stacks: Path, may_stay: bool
    ) -> Iterator[Mapping[str, WorkerGroup]]:
        """The worker groups of a job, by pool: those that the job before has left, if its pools were the same.

        may_stay: whether the next job may have the processes of this one; those of a job that fails it never has.
        A CommunicationError that leaves the block says which rank is to blame; stacks: the file for those of a hang.
        """
        like = likeness(placed, deadline)
        if self._like != like:
            self.release()
        stays = False
        try:
            if self._groups:
                for group in self._groups.values():
                    group.take_over(log)
            else:
                self._start(placed, log, deadline)
            with log.meter.watching():
                yield self._groups
            stays = may_stay and self._are_clear()
            self._like = like
        except CommunicationError as error:
            ranks = [rank for group in self._groups.values() for rank in group.inspect()]
            raise diagnose(error, ranks, stacks) from error
        finally:
            if not stays:
                self.release()

    def beside(self, pool: str, name: str, *, log: CallLog, deadline: float) -> None:
        """Start one more group of a single process, which takes no slot, beside a pool; unless a job before has."""
        if name not in self._groups:
            beside = BesidePool(next(each for each in self._pools if each.name == pool), name=name)
            self._groups[name] = self._group(beside, "CPU", {THREADS: "1"}, log, deadline)

    def release(self) -> None:
        """End the processes and give the slots back; with Ray they have ended, too."""
        ends = [group.stop for group in self._groups.values()] + [pool.release for pool in self._pools]
        for end in [] if how_ray_ended() else ends:
            with suppress(Exception):  # it must not hide why a job ended
                end()
        self._like, self._pools, self._groups = None, [], {}

    def _are_clear(self) -> bool:
        """Clear the workers of the finished job. Return False if a process did not answer."""
        try:
            for group in self._groups.values():
                group.clear()
        except TrainerError:
            return False
        return True

    def _start(self, placed: DeviceMapping, log: CallLog, deadline: float) -> None:
        for pool in placed.pools:
            reserved = ResourcePool(pool.slots_per_machine, name=pool.name, device=placed.device)
            reserved.reserve(deadline=POOL_DEADLINE_SECONDS)
            self._pools.append(reserved)
        for pool, reserved, threads in zip(placed.pools, self._pools, threads_told(self._pools), strict=True):
            self._groups[pool.name] = self._group(reserved, placed.device, threads, log, deadline)

    @staticmethod
    def _group(
        pool: ResourcePool, device: Device, threads: Mapping[str, str], log: CallLog, deadline: float
    ) -> WorkerGroup:
        return WorkerGroup(
            pool,
            start=partial(join, device, COLLECTIVE_DEADLINES * deadline),
            environment={**threads, **HEAP, **unless_set(WAITING)},
            log=log,
            deadline=deadline,
        )


def likeness(placed: DeviceMapping, deadline: float) -> object:
    """Return the device, deadline and pools; a job may run in the processes of another job with the same."""
    return placed.device, deadline, [(pool.name, tuple(pool.slots_per_machine)) for pool in placed.pools]


def import_workers() -> None:
    """Import the modules that every rank needs and that take seconds."""
    import rlhf_trainer.run.worker_specs  # noqa: F401


def import_workers_and_data() -> None:
    """Import the modules of a rank that also reads data."""
    import rlhf_trainer.data.source  # noqa: F401

    import_workers()


def join(device: Device, timeout_seconds: float) -> int:
    """`distributed.start`, by a function that the controller can name without torch."""
    from rlhf_trainer.training import distributed

    return distributed.start(device, timeout_seconds)


def threads_told(pools: Sequence[ResourcePool]) -> list[dict[str, str]]:
    """Return OMP_NUM_THREADS for each pool; a number set by the user wins.

    In pods the operator, which knows their cores, has set it.
    """
    if own_attempt():
        return [{} for _ in pools]
    own = os.environ.get(THREADS, "")
    if own.isdecimal() and int(own):
        return [{THREADS: own} for _ in pools]
    return [{THREADS: str(threads)} for threads in threads_of(pools, ray.nodes())]


def unless_set(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables, with the user's own values where those are set."""
    return {name: os.environ.get(name, value) for name, value in variables.items()}
