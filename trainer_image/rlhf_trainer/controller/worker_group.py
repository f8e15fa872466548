"""The ranks of a pool as one object: a call goes to all of them by its transfer protocol and returns futures.

Calls are recorded first. Consecutive calls that a rank can run without waiting are sent to it as one message.
"""

from __future__ import annotations

import itertools
import operator
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import ray

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.controller.batch import BatchFuture
from rlhf_trainer.controller.call_log import CallLog
from rlhf_trainer.controller.diagnosis import RankState
from rlhf_trainer.controller.dispatch import Batches, Dispatch, RankPart, dispatch
from rlhf_trainer.controller.message import Message, get
from rlhf_trainer.controller.resource_pool import ResourcePool
from rlhf_trainer.controller.slot_process import INSPECTION, OUTLETS, CallRequest, SlotProcess
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.meeting import LOOPBACK, Meeting
from rlhf_trainer.telemetry import CONTROLLER
from rlhf_trainer.types import Transfer, transfers_of

INSPECT_SECONDS = 10.0
"""Seconds that a rank may take to answer `inspect`, which runs in a thread of its own."""
RAY_SETTINGS = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
"""Environment variables that `ray_session` sets and ranks need too: a Ray started by others does not pass them on."""


@dataclass(frozen=True)
class ValueFuture:
    """Future of the list of small values that a call returns; entry i is the sum over the ranks of `parts[i]`."""

    parts: Sequence[Sequence[Message]]
    """Messages to the ranks whose values are added up: one list of messages for each entry of the result."""
    place: int
    """Position of the call in each of these messages, which are lists of calls."""
    log: CallLog
    deadline: float

    def result(self) -> list[Any]:  # a method of the user's returns any value
        """Wait for the values, in the order of the ranks; the deadline starts again whenever an earlier call ends."""
        self.log.wait(deadline=self.deadline)
        outcomes = iter(get([each.ended for part in self.parts for each in part], deadline=self.deadline))
        return [reduce(operator.add, (next(outcomes)[self.place].value for _ in part)) for part in self.parts]


class WorkerGroup:
    """All worker processes of a pool, one for each slot; each process holds a rank of every model of the pool."""

    def __init__(
        self,
        pool: ResourcePool,
        *,
        start: Callable[[Meeting], object],
        environment: Mapping[str, str],
        log: CallLog,
        deadline: float,
        layout: ParallelSizes | None = None,
    ) -> None:
        """Start the processes; `build` joins them by torchrun's environment variables.

        start: initialises torch.distributed at a meeting. deadline: a wait fails if no call ends for this number of
        seconds. layout: parallel sizes over the pool's slots; None: all are data-parallel ranks.
        """
        self.name = pool.name
        self.layout = layout or ParallelSizes(data=pool.size)
        assert self.layout.world_size == pool.size, f"{self.layout} is not one of {pool.size} slots"
        self._log = log
        log.groups.append(self)
        self._pool, self._start, self._deadline = pool, start, deadline
        self._open: list[Message] = []
        """Unsent message for each rank, to which calls are added; empty if all calls are sent."""
        self._processes: list[int] = []
        self.hosts: list[str] = []
        """Host name of each rank's machine; empty until the workers are built."""
        self._building: list[ray.ObjectRef] = []
        self._environment = {**RAY_SETTINGS, **environment}
        self._ranks = self._started()

    def _started(self) -> list[ray.actor.ActorHandle]:
        pool, process = self._pool, ray.remote(concurrency_groups={INSPECTION: 1, OUTLETS: 1})(SlotProcess)
        options = {
            "num_cpus": pool.cpus_of_process,
            "num_gpus": 1 if pool.device == "GPU" else 0,
            "runtime_env": {"env_vars": self._environment},
        }
        return [
            process.options(scheduling_strategy=strategy, **options).remote(pool=pool.name, path=sys.path)
            for strategy, _ in pool.slots()
        ]

    def restart(self) -> None:
        """End all processes, dead or alive, and start one in each slot of the pool; `build` must be called again."""
        self.stop()
        self.layout = ParallelSizes(data=self._pool.size)
        self._log.readers.remove(self.name)
        self._open, self._processes, self.hosts, self._building = [], [], [], []
        self._ranks = self._started()

    def prepare(self, imports: Callable[[], None]) -> None:
        """Have every rank start `imports`, without waiting; a failed import is raised when the module is needed."""
        for handle in self._ranks:
            handle.prepare.remote(imports)

    def rendezvous(self, *, is_near: bool) -> Meeting:
        """Return an address on the first rank's machine for a process group; is_near: all its ranks are there."""
        ((address, port),) = get([self._ranks[0].rendezvous.remote()], deadline=self._deadline)
        return Meeting(address=LOOPBACK if is_near else address, port=port)

    def _join(self) -> None:
        pool = self._pool
        start = partial(self._start, self.rendezvous(is_near=len(pool.slots_per_machine) == 1))
        for rank, (handle, (_, local_rank)) in enumerate(zip(self._ranks, pool.slots(), strict=True)):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(pool.size),
                "LOCAL_RANK": "0" if pool.device == "GPU" else str(local_rank),  # Ray shows a process only its own GPU
            }
            self._building.append(handle.join.remote(variables, start))

    def build(self, workers: Mapping[str, WorkerSpec]) -> dict[str, ModelHandle]:
        """Have every rank join torch.distributed and then build the workers, in order; return their handles at once."""
        if not self._building:
            self._join()
        self.send()
        self._building += [
            handle.build.remote(role, spec.worker_class, spec.arguments)
            for role, spec in workers.items()
            for handle in self._ranks
        ]
        return {
            role: ModelHandle(self, role, spec.worker_class, layout=spec.layout, transfers=spec.transfers)
            for role, spec in workers.items()
        }

    def wait_until_built(self) -> None:
        """Wait until all ranks have built their workers; if some failed, raise the first error unchanged."""
        joined = get(self._building, deadline=self._deadline)[: len(self._ranks)]
        self._processes, self.hosts = [process for process, _ in joined], [host for _, host in joined]

    def add_reader(self, transfer: Transfer, layout: ParallelSizes) -> None:
        """Register a method of a model of this group as a reader: producers then send each rank's rows as blocks."""
        self._log.readers.add(self.name, layout, transfer)

    def call(
        self,
        role: str,
        method: str,
        transfer: Transfer,
        layout: ParallelSizes,
        batch: Batches | None,
        arguments: Mapping[str, object],
        *,
        groups: Sequence[ray.ObjectRef] = (),
    ) -> Batches | ValueFuture:
        """Record a call on every rank; return the batch with the added fields, or a `ValueFuture`.

        Calls are sent to a rank in lists (messages). A call that reads from other processes begins a message, and a
        call that other processes read ends one; waiting sends the rest. groups: finished rows of the batch
        (`RowGroup`); the method then runs on these rows only.
        """
        name, number = f"{role}.{method}", next(self._log.numbers)
        stream, transfer = self._log.streams.read(name, batch, transfer, in_groups=bool(groups))
        collected = transfer.protocol.collect(layout)
        counted = set(itertools.chain.from_iterable(collected))
        with self._log.recorder.span(CONTROLLER, f"dispatch {name}"):
            leaves = self._log.streams.begin(number, transfer, batch, [self._ranks[rank] for rank in sorted(counted)])
            dealt: Dispatch | None = None
            if batch is not None:
                readers, pool = self._log.readers, self.name
                dealt = dispatch(batch, transfer, readers, pool=pool, layout=layout, call=number, name=name)
            shares: Sequence[RankPart] = dealt.parts if dealt else [RankPart()] * len(self._ranks)
            now = time.time()
            requests = [
                CallRequest(
                    number=number,
                    role=role,
                    method=method,
                    arguments=arguments,
                    batch=share.batch,
                    cuts=share.local_cuts,
                    keeps=self._log.keeps,
                    in_groups=leaves and rank in counted,
                    groups=len(groups),
                    groups_of=stream,
                    counts=rank in counted,
                    sent=now,
                )
                for rank, share in enumerate(shares)
            ]
            self._record(requests, [[*share.references, *groups] for share in shares])
            place, messages = len(self._open[0].calls) - 1, self._open
            if dealt and transfer.adds is not None:
                is_read = any(message.requests[-1].blocks for message in messages)  # else the calls stay unsent
                return dealt.collect(self.send() if is_read else [[] for _ in messages])
        parts = [[messages[rank] for rank in ranks] for ranks in collected]
        return ValueFuture(parts, place, self._log, self._deadline)

    def _record(self, requests: Sequence[CallRequest], inputs: Sequence[Sequence[ray.ObjectRef]]) -> None:
        """Add a call to each rank's unsent message; a call that reads from other processes begins a new message."""
        if any(inputs):
            self.send()
        self._open = self._open or [Message(self.name, rank, references) for rank, references in enumerate(inputs)]
        for message, request in zip(self._open, requests, strict=True):
            message.add(request)

    def send(self) -> list[list[ray.ObjectRef]]:
        """Send each rank its recorded calls; return for each rank the references to the blocks of the last call."""
        messages, self._open = self._open, []
        if not messages:
            return []
        with self._log.recorder.span(CONTROLLER, f"send to {self.name}"):
            blocks = [message.send(handle) for message, handle in zip(messages, self._ranks, strict=True)]
        self._log.messages += messages
        return blocks

    def inspect(self) -> list[RankState]:
        """Return the state of every rank at this moment."""
        answers = self._ask_beside("inspect")
        return [self._rank_state(rank, answer) for rank, answer in enumerate(answers)]

    def abort_exchange(self) -> None:
        """Have every rank end the exchange of weights with another pool that it is in."""
        self._ask_beside("abort_exchange")

    def _ask_beside(self, method: str) -> list[ray.ObjectRef]:
        """Have every rank run a method beside its calls; return references to the answers, which may be late."""
        asked = [getattr(handle, method).options(concurrency_group=INSPECTION).remote() for handle in self._ranks]
        ray.wait(asked, num_returns=len(asked), timeout=INSPECT_SECONDS)
        return asked

    def _rank_state(self, rank: int, answer: ray.ObjectRef) -> RankState:
        process = f", process {self._processes[rank]}" if self._processes else ""
        name, host = f"rank {rank} of pool {self.name}{process}", self.hosts[rank] if self.hosts else ""
        last_call = self._log.unfinished_calls(self.name, rank)
        answered, is_dead = None, False
        try:
            answered = ray.get(answer, timeout=0)
        except ray.exceptions.RayError as error:
            is_dead = not isinstance(error, ray.exceptions.GetTimeoutError)
        return RankState(name=name, host=host, last_call=last_call, process=answered, is_dead=is_dead)

    def clear(self) -> None:
        """Have every rank close and forget its workers, so that the next job can use the processes."""
        self.send()
        get([handle.clear.remote() for handle in self._ranks], deadline=self._deadline)

    def take_over(self, log: CallLog) -> None:
        """Serve another job, with its call log, after `clear`."""
        self._log = log
        log.groups.append(self)
        self._building = self._building[: len(self._ranks)]  # keeps the answers of `join`; the workers are gone

    def stop(self) -> None:
        """Kill the processes of all ranks."""
        for handle in self._ranks:
            ray.kill(handle)


class ModelHandle:
    """Controller's handle of a model in a worker group: it has the worker class's marked methods, returning futures."""

    def __init__(
        self,
        group: WorkerGroup,
        role: str,
        worker_class: type,
        *,
        layout: ParallelSizes | None = None,
        transfers: Mapping[str, Transfer] | None = None,
    ) -> None:
        """Make a method for each of `transfers` (default: the class's declarations). layout: default: the group's."""
        self._group, self._role, self.layout = group, role, layout or group.layout
        self._transfers = transfers_of(worker_class) if transfers is None else transfers
        for name, transfer in self._transfers.items():
            group.add_reader(transfer, self.layout)
            setattr(self, name, partial(ModelHandle.call, self, name))

    def call(self, method: str, batch: Batches | None = None, **arguments: object) -> Any:  # by the method's `Transfer`
        """Record a call of a method on every rank; see `WorkerGroup.call`."""
        return self._group.call(self._role, method, self._transfers[method], self.layout, batch, arguments)

    def call_on_groups(self, method: str, batch: BatchFuture, groups: Sequence[ray.ObjectRef]) -> None:
        """Call a method on the finished rows in `groups`, which a generating call hands out while it still runs."""
        self._group.call(self._role, method, self._transfers[method], self.layout, batch, {}, groups=groups)
