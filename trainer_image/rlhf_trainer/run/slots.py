"""Slots of a run (GPUs or CPU workers): pools, and a process in each slot, which the next job may take over."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

import ray

from rlhf_api.names import Role
from rlhf_mapper.mapping import Device, DeviceMapping, MappedPool
from rlhf_trainer.controller.call_log import CallLog
from rlhf_trainer.controller.diagnosis import diagnose
from rlhf_trainer.controller.resource_pool import POOL_DEADLINE_SECONDS, BesidePool, ResourcePool, threads_of
from rlhf_trainer.controller.worker_group import WorkerGroup
from rlhf_trainer.errors import CommunicationError, Paused, TrainerError
from rlhf_trainer.meeting import Meeting
from rlhf_trainer.run.elastic_pool import ElasticMachines, elastic_machines
from rlhf_trainer.run.session import VARIABLES, how_ray_ended
from rlhf_trainer.run_folder.attempt import own_attempt

COLLECTIVE_DEADLINES = 2
"""Timeout of a collective as a multiple of the call deadline: the controller gives up first and names the bad rank."""
THREADS = "OMP_NUM_THREADS"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names of the environment variable of torch's allocator, the new one first."""


class Slots:
    """Worker groups of a run: one for each pool of the job that runs now, one job at a time."""

    def __init__(self) -> None:
        self._like: object = None
        """Device, deadline and pools (`likeness`) of processes that the next job may take over; None without any."""
        self._pools: list[ResourcePool] = []
        self._groups: dict[str, WorkerGroup] = {}

    def prepare(self, placed: DeviceMapping, *, home: Role, deadline: float) -> None:
        """Start the processes of the first job, which import what ranks need while the controller does the same.

        home: role of the model in whose pool the data is read. A failure here comes again in `held`, which reports it.
        """
        self._like = likeness(placed, deadline)
        with suppress(TrainerError):
            self._start(placed, CallLog(), deadline)
            for pool in placed.pools:
                self._groups[pool.name].prepare(partial(import_workers, reads_data=home in pool.models))
            return
        self.release()

    @contextmanager
    def held(
        self, placed: DeviceMapping, *, log: CallLog, deadline: float, stacks: Path, may_stay: bool
    ) -> Iterator[Mapping[str, WorkerGroup]]:
        """Give the block a job's worker groups by pool: the previous job's, if the pools were the same, or new ones.

        may_stay: whether the next job may take over the processes of a job that has succeeded or paused. stacks: file
        for the stacks of all ranks after a hang. A CommunicationError that leaves the block names the rank to blame.
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
            stays, self._like = may_stay and self._are_clear(), like
        except Paused:
            stays, self._like = may_stay and self._are_clear(), like
            raise
        except CommunicationError as error:
            ranks = [rank for group in self._groups.values() for rank in group.inspect()]
            raise diagnose(error, ranks, stacks) from error
        finally:
            if not stays:
                self.release()

    def beside(self, pool: str, name: str, *, log: CallLog, deadline: float) -> None:
        """Start a group of one process without a slot, on the machine of a pool's first rank, unless it is running."""
        if name not in self._groups:
            beside = BesidePool(next(each for each in self._pools if each.name == pool), name=name)
            self._groups[name] = self._group(beside, "CPU", {THREADS: "1"}, log, deadline)

    def machines_of(self, pool: MappedPool, say: Callable[[str], None]) -> ElasticMachines | None:
        """Return the machines of a pool that grows and shrinks; None if it keeps its size. say: tells the user why."""
        reserved = next(each for each in self._pools if each.name == pool.name)
        return elastic_machines(reserved, pool.allowed_machine_counts, say)

    def release(self) -> None:
        """End the processes and give the slots back to Ray; a Ray that has ended needs neither."""
        ends = [group.stop for group in self._groups.values()] + [pool.release for pool in self._pools]
        for end in [] if how_ray_ended() else ends:
            with suppress(Exception):  # an error here must not hide why a job ended
                end()
        self._like, self._pools, self._groups = None, [], {}

    def _are_clear(self) -> bool:
        """Clear the workers of the finished job. Return False if a process did not answer."""
        with suppress(TrainerError):
            for group in self._groups.values():
                group.clear()
            return True
        return False

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
            environment={**threads, **settings(device)},
            log=log,
            deadline=deadline,
        )


def likeness(placed: DeviceMapping, deadline: float) -> object:
    """Return a job's device, deadline and pools; jobs with equal ones may run in the same processes."""
    return placed.device, deadline, [(pool.name, tuple(pool.slots_per_machine)) for pool in placed.pools]


def settings(device: Device) -> dict[str, str]:
    """Return the settings of memory and waiting threads for processes on a device; the user's own values win."""
    if device == "CPU":
        return {name: os.environ.get(name, value) for name, value in VARIABLES["CPU"].items()}
    is_known = tuple(map(int, version("torch").split(".")[:2])) >= (2, 13)  # older versions refuse unknown names
    return VARIABLES["GPU"] if is_known and not any(name in os.environ for name in ALLOCATOR) else {}


def import_workers(*, reads_data: bool) -> None:
    """Import the modules that a rank needs and that take seconds; reads_data: also those for data sets."""
    if reads_data:
        import rlhf_trainer.data.source
    import rlhf_trainer.run.worker_specs  # noqa: F401


def join(device: Device, timeout_seconds: float, meeting: Meeting) -> int:
    """Start torch.distributed on a rank and return the rank; the controller can name this function without torch."""
    from rlhf_trainer.training import distributed

    return distributed.start(device, timeout_seconds, meeting)


def threads_told(pools: Sequence[ResourcePool]) -> list[dict[str, str]]:
    """Return OMP_NUM_THREADS by pool; a number set by the user wins. Empty in the operator's pods, which set it."""
    if own_attempt():
        return [{} for _ in pools]
    own = os.environ.get(THREADS, "")
    if own.isdecimal() and int(own):
        return [{THREADS: own} for _ in pools]
    return [{THREADS: str(threads)} for threads in threads_of(pools, ray.nodes())]
