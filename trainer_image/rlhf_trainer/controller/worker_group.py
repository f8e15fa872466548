"""The ranks of a pool as one object: a call goes to all of them by its transfer protocol and returns futures."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import ray

from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_trainer.controller.diagnosis import RankState
from rlhf_trainer.controller.dispatch import Batches, RankPart, Readers, dispatch
from rlhf_trainer.controller.resource_pool import ResourcePool
from rlhf_trainer.controller.slot_process import INSPECTION, CallRequest, SlotProcess
from rlhf_trainer.errors import CommunicationError, MemoryProblem, TrainerError
from rlhf_trainer.telemetry import CONTROLLER, Recorder, Report
from rlhf_trainer.types import Transfer, transfers_of


@dataclass(frozen=True)
class WorkerSpec:
    """The worker class of a role, and the arguments with which every rank of a group builds it."""

    worker_class: type
    arguments: Mapping[str, Any]
    layout: ParallelSizes | None = None
    """Of the model over the group's ranks; None: the group's own."""


@dataclass(frozen=True)
class ValueFuture:
    """The small values that a method returns, for each part of the result the references to its partial sums."""

    references: Sequence[Sequence[ray.ObjectRef]]
    log: CallLog
    deadline: float

    def result(self) -> list[Any]:
        """Wait for the values, in the order of the ranks; the deadline starts again whenever an earlier call ends."""
        self.log.wait(deadline=self.deadline)
        values = iter(get([each for part in self.references for each in part], deadline=self.deadline))
        return [reduce(operator.add, (next(values) for _ in part)) for part in self.references]


GATHER_SECONDS = 0.05
"""How long `get` waits for further values after the first; it sees a failure so much later."""
INSPECT_SECONDS = 10.0
"""How long a rank may take to say what it does; a thread of its own answers."""
RAY_SETTINGS = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
"""Settings of Ray that `ray_session` makes and ranks need too; a Ray that others started does not pass them on."""


@dataclass(frozen=True)
class SentCall:
    """A call that was sent to one rank of a pool, and the reference to its report."""

    pool: str
    rank: int
    name: str
    report: ray.ObjectRef

    def has_succeeded(self) -> bool:
        """Whether it has ended without an error."""
        try:
            ray.get(self.report, timeout=0)
        except ray.exceptions.RayError:
            return False
        return True


class CallLog:
    """What all groups of a job share: the readers of each field, and the calls of the step with their reports."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.readers = Readers()
        self.numbers = itertools.count()
        """Of the calls of the job."""
        self._calls: list[SentCall] = []
        self._drained: list[SentCall] = []

    def add(self, calls: Sequence[SentCall]) -> None:
        self._calls.extend(calls)

    def wait(self, *, deadline: float) -> None:
        """Wait until every call made so far has ended."""
        get([call.report for call in self._calls], deadline=deadline)

    def drain(self, *, deadline: float) -> list[Report]:
        """Wait until every call made so far has ended; returns their reports and the controller's."""
        self._drained, self._calls = self._calls, []
        with self.recorder.span(CONTROLLER, f"wait for {len(self._drained)} calls"):
            drained: list[Report] = get([call.report for call in self._drained], deadline=deadline)
        return [*drained, self.recorder.drain()]

    def unfinished_call(self, pool: str, rank: int) -> str:
        """The name of the first call that a rank has not ended without an error; empty if there is none."""
        mine = (call for call in [*self._drained, *self._calls] if (call.pool, call.rank) == (pool, rank))
        return next((call.name for call in mine if not call.has_succeeded()), "")


class WorkerGroup:
    """One process per slot of a pool, in which the colocated models of the pool live."""

    def __init__(
        self,
        pool: ResourcePool,
        *,
        start: Callable[[], int],
        environment: Mapping[str, str],
        log: CallLog,
        deadline: float,
        layout: ParallelSizes | None = None,
    ) -> None:
        """Start the processes; `build` joins them by torchrun's environment variables.

        start: initialises torch.distributed from the environment; deadline: seconds in which some call must end;
        layout: of the pool's slots; None: all are data-parallel ranks.
        """
        self.name = pool.name
        self.layout = layout or ParallelSizes(data=pool.size)
        assert self.layout.world_size == pool.size, f"{self.layout} is not one of {pool.size} slots"
        self._log = log
        self._deadline = deadline
        self._pool, self._start = pool, start
        self._processes: list[int] = []
        self._building: list[ray.ObjectRef] = []
        process = ray.remote(concurrency_groups={INSPECTION: 1})(SlotProcess)
        self._ranks = [
            process.options(
                scheduling_strategy=strategy,
                num_cpus=1,
                num_gpus=1 if pool.device == "GPU" else 0,
                runtime_env={"env_vars": {**RAY_SETTINGS, **environment}},
            ).remote(pool=pool.name)
            for strategy, _ in pool.slots()
        ]

    def prepare(self, imports: Callable[[], None]) -> None:
        """Have every rank import what it will need; returns at once, and a failure is that of whoever needs it."""
        for handle in self._ranks:
            handle.prepare.remote(imports)

    def _join(self) -> None:
        """Have the processes form a group of torch.distributed."""
        pool = self._pool
        ((address, port),) = get([self._ranks[0].rendezvous.remote()], deadline=self._deadline)
        for rank, (handle, (_, local_rank)) in enumerate(zip(self._ranks, pool.slots(), strict=True)):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(pool.size),
                "LOCAL_RANK": "0" if pool.device == "GPU" else str(local_rank),  # Ray shows a process only its own GPU
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
            }
            self._building.append(handle.join.remote(variables, self._start))

    def build(self, workers: Mapping[str, WorkerSpec]) -> None:
        """Have every rank build the workers, in the order given, after it has joined; returns at once."""
        if not self._building:
            self._join()
        self._building += [
            handle.build.remote(role, spec.worker_class, spec.arguments)
            for role, spec in workers.items()
            for handle in self._ranks
        ]

    def wait_until_built(self) -> None:
        """Wait for the workers of all ranks; the first failure is raised as itself."""
        self._processes = get(self._building, deadline=self._deadline)[: len(self._ranks)]

    def add_reader(self, transfer: Transfer, layout: ParallelSizes) -> None:
        """Add a method of a model of this group: from now on the fields that it reads are cut for its rows."""
        self._log.readers.add(self.name, layout, transfer)

    def call(
        self, role: str, method: str, transfer: Transfer, layout: ParallelSizes, batch: Batches | None, arguments: Any
    ) -> Any:
        """Send a call to every rank; returns the batch with the fields that the method adds, or its `ValueFuture`."""
        name, number = f"{role}.{method}", next(self._log.numbers)
        dealt = None
        if batch is not None:
            dealt = dispatch(batch, transfer, self._log.readers, pool=self.name, layout=layout, call=number, name=name)
        collected = transfer.protocol.collect(layout)
        counted = {rank for ranks in collected for rank in ranks}
        with self._log.recorder.span(CONTROLLER, f"dispatch {name}"):
            outputs = [
                self._send(
                    handle,
                    transfer,
                    dealt.parts[rank] if dealt else None,
                    CallRequest(
                        number=number,
                        role=role,
                        method=method,
                        arguments=arguments,
                        counts=rank in counted,
                        sent=time.time(),
                    ),
                )
                for rank, handle in enumerate(self._ranks)
            ]
        self._log.add([SentCall(self.name, rank, name, references[-1]) for rank, references in enumerate(outputs)])
        if batch is not None and dealt and transfer.adds is not None:
            return dealt.collect(batch, transfer, layout, outputs)
        return ValueFuture([[outputs[rank][0] for rank in ranks] for ranks in collected], self._log, self._deadline)

    @staticmethod
    def _send(handle: Any, transfer: Transfer, part: RankPart | None, request: CallRequest) -> list[ray.ObjectRef]:
        """Send one rank its part of a call; references to the blocks of its fields (or its value) and its report."""
        references: list[ray.ObjectRef] = []
        if part:
            given, references = part.inputs(transfer, reader=request.name)
            request = replace(request, batch=given, cuts=part.local_cuts)
        results = 1 if transfer.adds is None else sum(map(len, request.cuts.values()))
        sent = handle.call.options(num_returns=results + 1).remote(request, *references)
        return sent if results else [sent]

    def inspect(self) -> list[RankState]:
        """What every rank does at this moment."""
        answers = [handle.inspect.options(concurrency_group=INSPECTION).remote() for handle in self._ranks]
        ray.wait(answers, num_returns=len(answers), timeout=INSPECT_SECONDS)
        return [self._rank_state(rank, answer) for rank, answer in enumerate(answers)]

    def _rank_state(self, rank: int, answer: ray.ObjectRef) -> RankState:
        process = f", process {self._processes[rank]}" if self._processes else ""
        name = f"rank {rank} of pool {self.name}{process}"
        last_call = self._log.unfinished_call(self.name, rank)
        try:
            return RankState(name=name, last_call=last_call, process=ray.get(answer, timeout=0))
        except ray.exceptions.GetTimeoutError:
            return RankState(name=name, last_call=last_call, process=None)
        except ray.exceptions.RayError:
            return RankState(name=name, last_call=last_call, process=None, is_dead=True)

    def clear(self) -> None:
        """Have every rank close and forget its workers, for the next job; those of this one can be called no more."""
        get([handle.clear.remote() for handle in self._ranks], deadline=self._deadline)

    def take_over(self, log: CallLog) -> None:
        """Serve another job, after `clear`."""
        self._log = log
        self._building = self._building[: len(self._ranks)]  # that ranks have joined; the workers are gone

    def stop(self) -> None:
        """End the processes."""
        for handle in self._ranks:
            ray.kill(handle)


class ModelHandle:
    """A model of a worker group: each marked method of its worker class is a method here, and returns futures."""

    def __init__(
        self, group: WorkerGroup, role: str, worker_class: type, *, layout: ParallelSizes | None = None
    ) -> None:
        """`layout`: of the model over the group's ranks, if it is not the group's."""
        layout = layout or group.layout
        for name, transfer in transfers_of(worker_class).items():
            group.add_reader(transfer, layout)
            setattr(self, name, partial(self._call, group, role, name, transfer, layout))

    @staticmethod
    def _call(
        group: WorkerGroup,
        role: str,
        name: str,
        transfer: Transfer,
        layout: ParallelSizes,
        batch: Batches | None = None,
        **arguments: Any,
    ) -> Any:
        return group.call(role, name, transfer, layout, batch, arguments)


def get(references: Sequence[ray.ObjectRef], *, deadline: float) -> list[Any]:
    """The values, as `ray.get` gives them, as long as one more of them arrives every `deadline` seconds.

    Failures are ours: the worker's own error, or CommunicationError for a lost or silent worker.
    """
    values: dict[ray.ObjectRef, Any] = {}
    pending = list(references)
    try:
        while pending:
            arrived, pending = ray.wait(pending, timeout=deadline)
            if not arrived:
                raise CommunicationError(f"no call of a worker ended within {deadline:.0f} s")
            if pending:  # a wait costs as much as there are references: not one wait for each of them
                more, pending = ray.wait(pending, num_returns=len(pending), timeout=GATHER_SECONDS)
                arrived += more
            values.update(zip(arrived, ray.get(arrived), strict=True))
        return [values[reference] for reference in references]
    except ray.exceptions.RayError as error:
        # a call that was to read what a lost worker made fails as a task of its own
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        if isinstance(cause, TrainerError):
            raise cause from error
        if isinstance(cause, ray.exceptions.OutOfMemoryError):
            sentence = f"Ray ended a worker, for this machine is out of memory: {first_line(cause)}"
            raise MemoryProblem(sentence) from error
        if isinstance(cause, ray.exceptions.RayError):
            raise CommunicationError(f"a worker was lost: {first_line(cause)}") from error
        raise


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [""])[0]
