"""The process of one slot: the workers of all models of its pool, and the calls that the controller makes on them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_trainer.controller.batch import BatchSlice
from rlhf_trainer.controller.stacks import Sight, sight
from rlhf_trainer.errors import CommunicationError, EnvironmentProblem, MemoryProblem, TrainerError
from rlhf_trainer.fields import require_declared
from rlhf_trainer.telemetry import TRANSFER, recorder
from rlhf_trainer.types import transfers_of

SIDE = "side"
"""The concurrency group whose thread runs `look` while another runs the calls."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One rank's part of a call, sent as one value beside the references to what it reads.

    Ray serialises each argument by itself, at a price, but brings along the values of references that are arguments.
    For one inside the order, the worker would have to ask the controller's process.
    """

    role: str
    method: str
    batch: BatchSlice | None
    arguments: Mapping[str, Any]
    cuts: Mapping[str, Sequence[slice]]
    """The pieces into which each field that the rank adds is cut."""
    counts: bool
    """Whether what the method measures here counts; see `Recorder.counting`."""
    sent: float
    """When the controller sent it, in seconds of its machine's clock."""

    @property
    def name(self) -> str:
        return f"{self.role}.{self.method}"


class SlotProcess:
    """One rank of a worker group. Calls run one at a time, in the order in which the controller made them."""

    def __init__(self, *, pool: str) -> None:
        recorder.pool = pool
        self._workers: dict[str, Any] = {}
        self._running, self._thread = "", 0
        self._free_since = time.time()

    def look(self) -> Sight:
        """What this process does now, also while a call runs."""
        return sight(self._running, self._thread)

    def rendezvous(self) -> tuple[str, int]:
        """Address and a free port of this machine, for rank 0 of a group."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def join(self, environment: Mapping[str, str], start: Callable[[], int]) -> int:
        """Take up torchrun's environment contract and start torch.distributed by it; `start` returns the rank.

        Returns the number of this process.
        """
        os.environ.update(environment)
        with self._doing("join"):
            recorder.rank = start()
        return os.getpid()

    def build(self, role: str, worker_class: type, arguments: Mapping[str, Any]) -> None:
        """Make the worker of a role in this process."""
        with self._doing(f"{role}.__init__"), translated_errors(role):
            self._workers[role] = worker_class(**arguments)

    def call(self, order: Order, *tensors: Tensor) -> Any:
        """Run a method; it begins when the tensors that it reads are there.

        Returns the pieces, by the order's cuts, of each field it adds (or, if it adds none, its value), and what was
        measured.
        """
        with self._doing(order.name), translated_errors(order.name):
            result = self._call(order, tensors)
            if not transfers_of(type(self._workers[order.role]))[order.method].adds:
                return result, recorder.drain()
            assert order.batch is not None, "a method that adds fields has a batch"
            require_declared(result, rows=len(order.batch.rows))
            # a view would be sent with all that it is a view of
            pieces = [result[name][rows].cpu().clone() for name, parts in order.cuts.items() for rows in parts]
            return (*pieces, recorder.drain()) if pieces else recorder.drain()

    @contextmanager
    def _doing(self, call: str) -> Iterator[None]:
        self._running, self._thread = call, threading.get_ident()
        try:
            yield
        finally:
            self._running, self._free_since = "", time.time()

    def _call(self, order: Order, tensors: Sequence[Tensor]) -> Any:
        worker = self._workers[order.role]
        transfer = transfers_of(type(worker))[order.method]
        positional = []
        if order.batch is not None:
            with recorder.span(TRANSFER, f"{order.name}: fetch", since=max(order.sent, self._free_since)):
                positional = [order.batch.filled(tensors)]
        run = getattr(worker, order.method)
        timed = recorder.span(transfer.phase, order.name) if transfer.phase else nullcontext()
        with timed, recorder.counting(order.counts):
            return run(*positional, **order.arguments)


@contextmanager
def translated_errors(where: str) -> Iterator[None]:
    """Whatever is raised in the block leaves it as one of our errors, a sentence that says where it happened."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        reason = f"{where} on rank {recorder.rank}: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
        raise kind_of(error)(reason) from error


def kind_of(error: Exception) -> type[TrainerError]:
    """Which of our errors a library's error is."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return MemoryProblem
    if isinstance(error, dist.DistError | ray.exceptions.RayError) or any(
        name in str(error) for name in ("gloo", "NCCL")
    ):
        return CommunicationError
    if isinstance(error, OSError):
        return EnvironmentProblem
    return TrainerError
