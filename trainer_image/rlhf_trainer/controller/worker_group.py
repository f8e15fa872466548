"""The ranks of a pool seen as one: a call goes to all of them by its transfer protocol and returns futures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from rlhf_trainer.controller.batch import BatchFuture, Piece
from rlhf_trainer.controller.resource_pool import ResourcePool
from rlhf_trainer.controller.slot_process import SlotProcess
from rlhf_trainer.errors import CommunicationError, MemoryProblem, TrainerError
from rlhf_trainer.protocols import Layout
from rlhf_trainer.telemetry import CONTROLLER, Recorder, Report
from rlhf_trainer.types import Transfer, transfers_of


@dataclass(frozen=True)
class WorkerSpec:
    """The class and the arguments from which every rank of a group builds the worker of a role."""

    worker_class: type
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Values:
    """Small values that a method returned, a reference for each collected rank."""

    references: Sequence[ray.ObjectRef]
    deadline: float

    def result(self) -> list[Any]:
        """Wait for the values, in the order of the ranks."""
        values: list[Any] = get(self.references, deadline=self.deadline)
        return values


class CallLog:
    """The calls of a step, whose reports are collected at its end."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self._reports: list[ray.ObjectRef] = []

    def add(self, reports: Sequence[ray.ObjectRef]) -> None:
        self._reports.extend(reports)

    def drain(self, *, deadline: float) -> list[Report]:
        """Wait until every call made so far has ended; what each rank measured in each, and the controller's spans."""
        reports, self._reports = self._reports, []
        with self.recorder.span(CONTROLLER, f"wait for {len(reports)} calls"):
            drained: list[Report] = get(reports, deadline=deadline)
        return [*drained, self.recorder.drain()]


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
    ) -> None:
        """Start the processes and join them by torchrun's contract.

        `start` initialises torch.distributed from the environment; `deadline` (seconds) holds for every remote call.
        """
        self.layout = Layout(data=pool.size)
        self._log = log
        self._deadline = deadline
        process = ray.remote(SlotProcess)
        self._ranks = [
            process.options(
                scheduling_strategy=strategy,
                num_cpus=1,
                num_gpus=1 if pool.device == "GPU" else 0,
                runtime_env={"env_vars": dict(environment)},
            ).remote(pool=pool.name, deadline=deadline)
            for strategy, _ in pool.slots()
        ]
        address, port = get(self._ranks[0].rendezvous.remote(), deadline=deadline)
        self._building = []
        for rank, (handle, (_, local_rank)) in enumerate(zip(self._ranks, pool.slots(), strict=True)):
            contract = {
                "RANK": str(rank),
                "WORLD_SIZE": str(pool.size),
                "LOCAL_RANK": "0" if pool.device == "GPU" else str(local_rank),  # Ray shows a process only its own GPU
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
            }
            self._building.append(handle.join.remote(contract, start))

    def build(self, workers: Mapping[str, WorkerSpec]) -> None:
        """Have every rank build the workers, in the order given; returns at once."""
        self._building += [
            handle.build.remote(role, spec.worker_class, spec.arguments)
            for role, spec in workers.items()
            for handle in self._ranks
        ]

    def wait_until_built(self) -> None:
        """Wait for the workers of all ranks; the first failure is raised as itself."""
        get(self._building, deadline=self._deadline)

    def call(self, role: str, method: str, transfer: Transfer, batch: BatchFuture | None, arguments: Any) -> Any:
        """Send a call to every rank; returns the batch with the fields the method adds, or its `Values`."""
        reader = f"{role}.{method}"
        shares = transfer.protocol.distribute(self.layout, batch.size) if batch else [range(0)] * len(self._ranks)
        with self._log.recorder.span(CONTROLLER, f"dispatch {reader}"):
            outputs = [
                handle.call.options(num_returns=max(1, len(transfer.adds)) + 1).remote(
                    role, method, batch.slice(rows, transfer.reads, reader=reader) if batch else None, arguments
                )
                for handle, rows in zip(self._ranks, shares, strict=True)
            ]
        self._log.add([references[-1] for references in outputs])
        collected = transfer.protocol.collect(self.layout)
        if not transfer.adds or batch is None:
            return Values([outputs[rank][0] for rank in collected], self._deadline)
        return batch.having(
            {
                name: [Piece(shares[rank].start, shares[rank].stop, outputs[rank][place]) for rank in collected]
                for place, name in enumerate(transfer.adds)
            }
        )

    def stop(self) -> None:
        """End the processes."""
        for handle in self._ranks:
            ray.kill(handle)


class ModelHandle:
    """A model of a worker group: each marked method of its worker class is a method here, and returns futures."""

    def __init__(self, group: WorkerGroup, role: str, worker_class: type) -> None:
        for name, transfer in transfers_of(worker_class).items():
            setattr(self, name, partial(self._call, group, role, name, transfer))

    @staticmethod
    def _call(
        group: WorkerGroup, role: str, name: str, transfer: Transfer, batch: BatchFuture | None = None, **arguments: Any
    ) -> Any:
        return group.call(role, name, transfer, batch, arguments)


def get(references: Any, *, deadline: float) -> Any:
    """`ray.get` whose failures are ours: the worker's own error, or CommunicationError for a lost or silent worker."""
    try:
        return ray.get(references, timeout=deadline)
    except ray.exceptions.GetTimeoutError:
        raise CommunicationError(f"no answer from a worker within {deadline:.0f} s") from None
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, TrainerError):
            raise error.cause from error
        raise
    except ray.exceptions.OutOfMemoryError as error:
        raise MemoryProblem(f"Ray ended a worker, for this machine is out of memory: {first_line(error)}") from error
    except ray.exceptions.RayError as error:
        raise CommunicationError(f"a worker process died: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [""])[0]
