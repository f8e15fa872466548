"""Process of one slot (GPU or CPU worker): holds a worker of each model of its pool and runs the controller's calls."""

from __future__ import annotations

import errno
import gc
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, cast

import ray

from rlhf_api.spec.custom_algorithm import own_line
from rlhf_trainer.collector import collector_off
from rlhf_trainer.controller.batch import BatchSlice, Kept, tensor_bytes
from rlhf_trainer.controller.diagnosis import ProcessState, inspect_process
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.errors import CommunicationError, EnvironmentProblem, MemoryProblem, TrainerError, UserCodeError
from rlhf_trainer.row_groups import Gathered, Outlet, RowGroup
from rlhf_trainer.telemetry import TRANSFER, Report, recorder
from rlhf_trainer.types import Batch, Fields, Transfer

if TYPE_CHECKING:  # the process starts without torch, which it imports while the controller does the same
    from torch import Tensor

INSPECTION = "inspection"
"""Ray concurrency group, and so the thread, in which `inspect` answers while another thread runs a call."""
OUTLETS = "outlets"
"""Ray concurrency group, and so the thread, in which `row_group` answers while another thread runs a call."""


@dataclass(frozen=True, kw_only=True)
class CallRequest:
    """Request to one rank to run its part of a call.

    A rank gets a list of requests in one Ray call. Further arguments of the Ray call are references to the tensors that
    the first request reads. Ray brings only references that are arguments themselves to the worker. The worker would
    have to fetch references inside a request through the controller's process.
    """

    number: int
    """Number of the call among all calls of the job; the same on every rank."""
    role: str
    method: str
    arguments: Mapping[str, object]
    batch: BatchSlice | None = None
    cuts: Mapping[str, Sequence[slice]] = field(default_factory=dict)
    """Slices of rows that other processes read, by added field; rows count from the rank's first one. The rank returns
    each slice as a tensor of its own, a block."""
    keeps: int = 0
    """Number of earlier training steps whose added fields can still be read."""
    in_groups: bool = False
    """Whether other processes fetch the added rows in groups, by `row_group`, before the call has ended."""
    groups: int = 0
    """Number of row groups (finished responses) at the end of the inputs, one from each generating rank. The method
    runs on the rows of these groups only."""
    groups_of: int | None = None
    """Number of the generating call that gave the row groups. If `groups` is 0, the method has already run on all row
    groups of the generating call, and this call only returns the results."""
    counts: bool
    """Whether the means and sums that this rank measures are recorded; see `Recorder.counting`."""
    sent: float
    """Time when the controller recorded the call, in Unix seconds by the controller's clock."""

    @property
    def name(self) -> str:
        return f"{self.role}.{self.method}"

    @property
    def blocks(self) -> int:
        """Number of tensors that the rank returns for other processes: one for each slice in `cuts` of each field."""
        return sum(map(len, self.cuts.values()))


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call on one rank: the returned value and the measurements."""

    number: int
    value: Any
    """Value that the method returned; None if it adds fields."""
    report: Report


class SlotProcess:
    """One rank of a worker group. Calls run one at a time, in the order in which the controller made them."""

    def __init__(self, *, pool: str, path: Sequence[str]) -> None:
        """path: the controller's `sys.path`; entries that this process lacks are added at the end of its `sys.path`."""
        sys.path += [each for each in path if each not in sys.path]
        recorder.pool = pool
        resource_tracker._HAVE_SIGMASK = False  # type: ignore[attr-defined]  # noqa: SLF001 it would let SIGTERM through
        self._workers: dict[str, Any] = {}
        self._specs: dict[str, WorkerSpec] = {}
        self._step: int | None = None
        self._kept: dict[int, Batch | TrainerError] = {}
        """Number of a call -> fields that the call added, or its error; only of steps that may still be read."""
        self._outlets: dict[int, Outlet] = {}
        """Number of a generating call -> outlet, from which other processes fetch its finished responses in groups."""
        self._gathered: dict[tuple[int, str], Gathered] = {}
        """(number of a generating call, name of a scoring call) -> results of the scoring call for the row groups."""
        self._running, self._thread = "", 0
        self._free_since = time.time()

    def prepare(self, imports: Callable[[], None]) -> None:
        """Import the modules that workers will need."""
        with collector_off():
            imports()

    def inspect(self) -> ProcessState:
        """Return the state of this process; answers also while a call runs."""
        return inspect_process(self._running, self._thread, quiet_seconds=time.time() - self._free_since)

    def abort_exchange(self) -> None:
        """End an exchange of weights with another pool after the loss of a rank, even while a call waits for it."""
        for worker in list(self._workers.values()):
            if hasattr(worker, "abort_exchange"):
                worker.abort_exchange()

    def row_group(self, call: int, number: int) -> RowGroup:
        """Wait for row group `number` (from 0) of finished responses of a generating call, also while the call runs."""
        group = self._outlet(call).take(number)
        if group.is_last:
            del self._outlets[call]
        return group

    def rendezvous(self) -> tuple[str, int]:
        """Return this machine's address and a free port on it, for rank 0 of a torch.distributed group."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def join(self, environment: Mapping[str, str], start: Callable[[], object]) -> tuple[int, str]:
        """Set torchrun's environment variables and call `start`, which starts torch.distributed.

        Returns (id of this process, name of the machine). A library's error becomes a TrainerError.
        """
        os.environ.update(environment)
        import torch

        recorder.rank = int(environment["RANK"])
        with self._running_call("join"), translated_errors("join"):
            start()
        self._seed = torch.initial_seed()
        return os.getpid(), socket.gethostname()

    def build(self, role: str, worker_class: type, arguments: Mapping[str, object]) -> None:
        init: Callable[..., Any] = worker_class.__init__  # type: ignore[misc]  # for error messages
        with (
            self._running_call(f"{role}.__init__"),
            translated_errors(role, worker_class if init is object.__init__ else init),
        ):
            self._specs[role] = WorkerSpec(worker_class, arguments)
            self._workers[role] = worker_class(**arguments)

    def clear(self) -> None:
        """Close the workers, forget them and their fields, and seed torch as at the start: the process is as if new.

        A worker that holds more than memory has a method `close`. The process groups stay: torch's caches know the
        meshes of the workers that are gone. A library's error becomes a TrainerError.
        """
        import torch

        with self._running_call("clear"), translated_errors("clear"):
            while self._workers:
                _, worker = self._workers.popitem()
                if hasattr(worker, "close"):
                    worker.close()
                del worker
            self._specs.clear()
            self._kept.clear()
            self._outlets.clear()
            self._gathered.clear()
            gc.unfreeze()  # reference cycles hold models, and `collector_off` has frozen some of them
            gc.collect()
            torch.manual_seed(self._seed)

    def run(self, requests: Sequence[CallRequest], *tensors: Tensor | RowGroup) -> list[Outcome] | tuple[object, ...]:
        """Run calls, one after the other. Ray starts this method when the inputs of the first call are in this process.

        Returns the blocks of the last call's fields that other processes read, and then a list of all calls' outcomes.
        Added fields stay in this process until a call of a later step drops them. After a failure no further call runs,
        and later calls of this process that read the missing fields fail with the same error.
        """
        outcomes: list[Outcome] = []
        blocks: list[Tensor] = []
        try:
            for request in requests:
                outcome, blocks = self._run(request, () if outcomes else tensors)
                outcomes.append(outcome)
        except TrainerError as error:
            for request in requests[len(outcomes) :]:
                self._kept[request.number] = error
                if request.in_groups:
                    self._outlet(request.number).fail(error)
                if request.groups:
                    self._gathered_by(request).error = error
            raise
        return (*blocks, outcomes) if blocks else outcomes

    def _run(self, request: CallRequest, tensors: Sequence[Tensor | RowGroup]) -> tuple[Outcome, list[Tensor]]:
        """Run a worker method; return the outcome, and for other processes a tensor for each slice in `cuts`."""
        from rlhf_trainer.fields import require_declared

        spec = self._specs[request.role]
        transfer = spec.transfers[request.method]
        with self._running_call(request.name), translated_errors(request.name, spec.code_of(request.method)):
            result = self._call(request, transfer, tensors)
            if request.batch is None or transfer.adds is None or request.groups:
                return Outcome(request.number, result, recorder.drain()), []
            fields = cast("Fields", result)
            require_declared(fields, transfer.adds, rows=len(request.batch.rows))
            added = {name: tensor.cpu() for name, tensor in fields.items()}
            rows = request.batch.rows
            self._kept[request.number] = Batch(step=request.batch.step, start=rows.start, size=len(rows), fields=added)
            # a clone, as a view would be sent with the whole tensor that it is a view of
            blocks = [added[name][part].clone() for name, parts in request.cuts.items() for part in parts]
            return Outcome(request.number, None, recorder.drain()), blocks

    def _read_kept(self, place: Kept) -> Tensor:
        """Return this process's rows of a field that an earlier call added; if that call failed, raise its error."""
        made = self._kept.get(place.call)
        if made is None:
            raise TrainerError(f"{place.name} was added in another step, or its call did not run")
        if isinstance(made, TrainerError):
            raise made
        return made.fields[place.name][place.rows.start - made.start : place.rows.stop - made.start]

    def _forget(self, step: int, keeps: int) -> None:
        """Forget the fields added in steps other than `step`, except for training steps that are still read."""
        oldest = max(step - keeps, 1) if keeps else math.inf
        for number, made in list(self._kept.items()):
            if isinstance(made, TrainerError) or not (made.step == step or made.step >= oldest):
                del self._kept[number]
        self._gathered.clear()

    @contextmanager
    def _running_call(self, call: str) -> Iterator[None]:
        self._running, self._thread = call, threading.get_ident()
        try:
            yield
        finally:
            self._running, self._free_since = "", time.time()

    def _call(self, request: CallRequest, transfer: Transfer, given: Sequence[Tensor | RowGroup]) -> object:
        positional, arguments = [], dict(request.arguments)
        if request.batch is not None:
            if request.batch.step != self._step:
                self._forget(request.batch.step, request.keeps)
                self._step = request.batch.step
            if request.groups_of is not None and not request.groups:
                return self._gathered.pop((request.groups_of, request.name)).result()
            with recorder.span(TRANSFER, f"{request.name}: fetch", since=max(request.sent, self._free_since)):
                positional = [self._batch(request, given)]
        if request.in_groups:
            arguments["outlet"] = self._outlet(request.number)
        if transfer.beside:
            arguments[transfer.beside] = self._workers[transfer.beside]
        run = getattr(self._workers[request.role], request.method)
        timed = recorder.span(transfer.phase, request.name) if transfer.phase else nullcontext()
        with timed, recorder.counting(request.counts):
            result = run(*positional, **arguments)
        if request.groups:
            self._gathered_by(request).add(result)
            return None
        return result

    def _batch(self, request: CallRequest, given: Sequence[Tensor | RowGroup]) -> Batch:
        """Return the batch of a call; given: tensors from other processes, followed by the row groups."""
        assert request.batch
        count = len(given) - request.groups
        groups, tensors = cast("Sequence[RowGroup]", given[count:]), cast("Sequence[Tensor]", given[:count])
        batch = request.batch.filled(tensors, self._read_kept)
        if not groups:
            return batch
        recorder.add("bytes/transfer", tensor_bytes(groups))
        return self._gathered_by(request).batch_of(batch, groups)

    def _outlet(self, call: int) -> Outlet:
        """Return the outlet of a call's row groups; the first of two threads that call this creates the outlet."""
        return self._outlets.setdefault(call, Outlet())

    def _gathered_by(self, request: CallRequest) -> Gathered:
        assert request.batch
        assert request.groups_of is not None
        return self._gathered.setdefault((request.groups_of, request.name), Gathered(request.batch.rows))


@contextmanager
def translated_errors(where: str, method: Callable[..., object] | None = None) -> Iterator[None]:
    """Turn any error in the `with` block into a TrainerError whose sentence says in which call and rank it was raised.

    method: the called worker method. For a user's method, or an error in the user's code, file and line are named, too.
    """
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        kind, said = kind_of(error), " ".join(str(error).split())
        if kind is MemoryProblem:
            said = said.partition(" GPU ")[0][:100].rstrip(".")
            reason = f"{where} on rank {recorder.rank} has not enough memory ({said}); {memory_remedy(where)}"
        else:
            own = own_line(error, method)
            kind = UserCodeError if own and kind is TrainerError else kind
            reason = f"{where} on rank {recorder.rank}: {type(error).__name__}: {said[:500]}{own}"
        raised = kind(reason)
        raised.host = socket.gethostname()
        raise raised from error


def memory_remedy(where: str) -> str:
    """Return advice that saves memory in the call `where` (role.method; without a method while workers are built)."""
    _, _, method = where.partition(".")
    if method == "generate_sequences":
        return "lower spec.rollout.gpuMemoryUtilization, on CPU spec.data.maxResponseTokens"
    return "lower spec.training.microBatchTokens" if method else "take more slots, or set spec.models.*.offload"


def kind_of(error: Exception) -> type[TrainerError]:
    """Return the class of TrainerError into which a library's error is turned."""
    import torch
    import torch.distributed as dist

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return MemoryProblem
    is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE  # another attempt takes another port
    if is_taken or isinstance(error, dist.DistError | ray.exceptions.RayError):
        return CommunicationError
    if any(name in str(error) for name in ("gloo", "NCCL")):
        return CommunicationError
    if isinstance(error, OSError | torch.AcceleratorError):  # the latter: failures of a device
        return EnvironmentProblem
    return TrainerError
