"""Messages (lists of calls) of the controller to ranks, and waits for results; Ray's errors become TrainerErrors."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import ray

from rlhf_trainer.controller.resource_pool import LOOK_SECONDS
from rlhf_trainer.controller.slot_process import CallRequest, Outcome
from rlhf_trainer.errors import CommunicationError, MemoryProblem, TrainerError


@dataclass
class Message:
    """Message of the controller to one rank: calls that the rank runs one after the other.

    Only the first call may read from other processes, so that no call waits for the inputs of another. Only the last
    call may be read by other processes, as Ray gives the results of a message when all its calls have ended.
    """

    pool: str
    rank: int
    inputs: Sequence[ray.ObjectRef]
    """References to the blocks that the first call reads from other processes."""
    calls: list[str] = field(default_factory=list)
    """Names of the calls, such as `actor.update_actor`, in the order in which the rank runs them."""
    requests: list[CallRequest] = field(default_factory=list)
    """Request to the rank for each of `calls`; empty once the message is sent."""
    step: int = 0
    """Latest step of the calls' batches; 0 for calls without a batch and for evaluations."""
    ended: ray.ObjectRef | None = None
    """Reference to the outcomes of the calls; None until the message is sent."""

    def __str__(self) -> str:
        """Return the names of the first and the last call, as part of a sentence."""
        first, last = self.calls[0], self.calls[-1]
        return first if len(self.calls) == 1 else f"one of {len(self.calls)} calls from {first} to {last}"

    def add(self, request: CallRequest) -> None:
        self.calls.append(request.name)
        self.requests.append(request)
        self.step = max(self.step, request.batch.step if request.batch else 0)

    def send(self, handle: ray.actor.ActorHandle) -> list[ray.ObjectRef]:
        """Send the message to its rank; return references to the blocks of the last call."""
        results = 1 + self.requests[-1].blocks
        method = handle.run.options(num_returns=results) if results > 1 else handle.run
        sent = method.remote(self.requests, *self.inputs)
        *blocks, self.ended = sent if results > 1 else [sent]
        self.requests = []
        return blocks

    def outcomes(self) -> Sequence[Outcome] | None:
        """Return the outcomes of all calls of the message; None unless all have ended without an error."""
        try:
            return cast("Sequence[Outcome]", ray.get(self.ended, timeout=0))
        except ray.exceptions.RayError:
            return None


def get(
    references: Sequence[ray.ObjectRef | None],
    *,
    deadline: float,
    quiet_seconds: Callable[[], float] = lambda: math.inf,
    look: Callable[[], None] = lambda: None,
) -> list[Any]:  # a reference does not say the type of its object
    """Return the values of the references, as `ray.get` does; fail if none arrives for `deadline` seconds.

    quiet_seconds: gives the seconds since the last end of any call, from which the deadline counts too: one value may
    take several calls. look: called every second. Raises the worker's own error, MemoryProblem if Ray ended a worker
    for its memory, or CommunicationError for a lost or silent worker.
    """
    values: dict[ray.ObjectRef, Any] = {}
    pending, patience = list(references), deadline
    try:
        while pending:
            arrived, pending = wait(pending, seconds=patience, look=look)
            patience = deadline if arrived else deadline - quiet_seconds()
            if patience <= 0:
                raise CommunicationError(f"no call of a worker ended within {deadline:.0f} s")
            if not arrived:
                continue
            if pending:  # each wait costs time for every reference, so collect all that arrive within 50 ms
                # a failure is seen that much later
                more, pending = ray.wait(pending, num_returns=len(pending), timeout=0.05)
                arrived += more
            values.update(zip(arrived, ray.get(arrived), strict=True))
        return [values[reference] for reference in references]
    except ray.exceptions.RayError as error:
        # a call that reads the result of a lost worker fails with a RayTaskError
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        if isinstance(cause, TrainerError):
            raise cause from error
        if isinstance(cause, ray.exceptions.OutOfMemoryError):
            why = f"this machine is out of memory: {first_line(cause)}"
            sentence = f"Ray ended a worker, for {why}; lower spec.training.microBatchTokens, or take fewer slots"
            raise MemoryProblem(sentence) from error
        if isinstance(cause, ray.exceptions.RayError):
            raise CommunicationError(f"a worker was lost: {first_line(cause)}") from error
        raise


def failed(references: Iterable[ray.ObjectRef | None]) -> bool:
    """Whether one of the calls has failed so far."""
    ended, _ = ray.wait(known, num_returns=len(known), timeout=0) if (known := list(references)) else ([], [])
    try:
        ray.get(ended)
    except ray.exceptions.RayError:
        return True
    return False


def wait(
    references: list[ray.ObjectRef], *, seconds: float, look: Callable[[], None] = lambda: None
) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
    """Wait as `ray.wait` does, but in short intervals, between which `look` and handlers of signals run."""
    until = time.monotonic() + seconds
    while True:
        left = max(0.0, until - time.monotonic())
        arrived, pending = ray.wait(references, timeout=min(left, LOOK_SECONDS))
        if arrived or left <= LOOK_SECONDS:
            return arrived, pending
        look()


def first_line(error: Exception) -> str:
    """Return the first line of an error's text; empty if there is no text."""
    return (str(error).strip().splitlines() or [""])[0]
