"""A generator that gets new weights while it writes responses (`rollout.partial`).

The actor says in the store of both pools' group that it is about to send; generators look every few tokens. So each
exchange is made in the middle of responses or, by a rank that has none under way, when it is called.
"""

from __future__ import annotations

import itertools
import time

from rlhf_trainer.hybrid_engine.hybrid_engine import Span
from rlhf_trainer.protocols import ONE_TO_ALL
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.types import register
from rlhf_trainer.workers.rollout import RolloutWorker

LOOK_TOKENS = 8
"""After how many tokens of a response weights are looked for: it takes a round trip to the actor's machine."""
LOOK_SECONDS = 0.005
"""How often a rank whose responses have ended looks for what the others tell."""


class PartialRolloutWorker(RolloutWorker):
    """One rank of a pool whose responses are not waited for when weights come.

    Ranks of an engine look and act together, as the first of them says. Between engines no rank waits for another in a
    collective but in an exchange, where another engine may be already.
    """

    _called = _exchanged = _batches = 0

    def start_generator(self, *, max_sequences: int) -> None:
        """It looks for weights while it writes."""
        super().start_generator(max_sequences=max_sequences)
        tokens = itertools.count(1)
        self._generator.before_token = lambda: None if next(tokens) % LOOK_TOKENS else self.take_offer()

    @register(ONE_TO_ALL)
    def span_pools(self, *, span: Span) -> None:
        """Join the group of both pools, in which nothing has been exchanged."""
        super().span_pools(span=span)
        self._called = self._exchanged = self._batches = 0

    @register(ONE_TO_ALL)
    def receive_weights(self) -> None:
        """Receive what the actor sends, unless that has been done while responses were written."""
        self._called += 1
        if self._exchanged < self._called:
            self._exchange()

    def take_offer(self) -> None:
        """Receive what the actor is about to send, if it is, while responses are under way."""
        is_offered = self._generator.is_first and self.notices.offers > self._exchanged
        if self._generator.agreed(is_offered):
            self._exchange()

    def widest(self, longest: int) -> int:
        """The largest of any rank, without a collective; weights are received until all have told theirs."""
        recorder.add("rollout_interrupted", 0.0)  # so that each step's record has it
        self._batches += 1
        self.notices.tell(self._batches, longest)
        while not (told := self._told()):
            self.take_offer()
            time.sleep(LOOK_SECONDS)
        return max(told)

    def _told(self) -> list[int] | None:
        """What all ranks of the pool have told of this batch; nothing until then."""
        found = self.notices.told(self._batches) if self._generator.is_first else None
        agreed: list[int] | None = self._generator.agreed(found)
        return agreed

    def _exchange(self) -> None:
        older = self.policy_version
        self._exchanged += 1
        super().receive_weights()
        if self.policy_version != older:
            recorder.add("rollout_interrupted", self._generator.weights_replaced(older))
