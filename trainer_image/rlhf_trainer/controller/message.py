"""Messages of the controller: the calls that one rank is sent at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import ray

from rlhf_trainer.controller.slot_process import CallRequest, Outcome


@dataclass
class Message:
    """Message of the controller to one rank: calls that the rank runs one after the other.

    Only the first call may read from other processes, so that no call waits for the inputs of another. Only the last
    call may be read by other processes, as Ray gives the results of a message when all its calls have ended.
    """

    pool: str
    rank: int
    inputs: Sequence[ray.ObjectRef]
    """References to the fields that the first call reads from other processes."""
    calls: list[str] = field(default_factory=list)
    requests: list[CallRequest] = field(default_factory=list)
    """Requests of the message's calls; empty once they are sent."""
    step: int = 0
    """Latest step of the calls' batches; 0 for calls without a batch and for evaluations."""
    ended: ray.ObjectRef | None = None
    """Reference to the outcomes of the calls; None until the message is sent."""

    def __str__(self) -> str:
        """Return the names of the first and the last call, as part of a sentence."""
        first, last = self.calls[0], self.calls[-1]
        return first if len(self.calls) == 1 else f"one of {len(self.calls)} calls from {first} to {last}"

    def add(self, request: CallRequest) -> None:
        """Add a call to the message."""
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
