"""Over 10,000 random schedules no response is staler than allowed, and each step trains once on rows of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from rlhf_api.job import Job
from rlhf_trainer.controller.message import Message
from rlhf_trainer.controller.slot_process import Outcome
from rlhf_trainer.run.assembly import ActorApart, RolloutPool
from rlhf_trainer.run.evaluation import Runtime
from rlhf_trainer.run.lookahead import Lookahead, queue
from rlhf_trainer.telemetry import Report

SCHEDULES = 10_000


@dataclass
class Pools:
    """What would be done by two pools, in the order of the calls."""

    version: int = 0
    """Updates of the policy so far."""
    sent: int = -1
    """The version of the weights that the generators have."""
    written: dict[int, int] = field(default_factory=dict)
    """Step -> the version that wrote its responses."""
    evaluated: list[int] = field(default_factory=list)
    """The versions that wrote what was evaluated."""

    def send_weights(self) -> None:
        self.sent = self.version

    def receive_weights(self) -> None:
        pass

    def generate_sequences(self, batch: Any) -> Any:
        if batch.step > 0:
            assert batch.step not in self.written, "the same prompts twice"
            self.written[batch.step] = self.sent
        else:
            self.evaluated.append(self.sent)
        return batch


def run(draw: random.Random) -> tuple[Pools, int, int, int]:
    """A job of random length that allows some staleness, begins at some step and is evaluated in between.

    Returns what its pools did, the staleness that is allowed, its first step and its last.
    """
    staleness, done, total = draw.randint(0, 5), draw.randint(0, 20), draw.randint(1, 40)
    total += done
    pools = Pools(version=done)
    actor = ActorApart(pools, pools, RolloutPool())
    data = SimpleNamespace(load_batch=lambda batch: batch)
    runtime = SimpleNamespace(
        models={"data": data, "actor": actor}, blank=lambda step, size: SimpleNamespace(step=step, size=size)
    )
    spec = SimpleNamespace(
        rollout=SimpleNamespace(max_staleness=staleness), columns=lambda _: (), data=SimpleNamespace(train=None)
    )
    job = SimpleNamespace(spec=spec, sequences_per_step=4)
    lookahead = Lookahead(cast("Job", job), cast("Runtime", runtime), first_step=done + 1, total_steps=total)
    for step in range(done + 1, total + 1):
        batch = actor.generate_sequences(lookahead.batch(step))
        assert batch.step == step
        assert pools.version - pools.written[step] <= staleness
        assert len([later for later in pools.written if later > step]) <= staleness, "the queue is bounded"
        pools.version += draw.random() < 0.9  # critics may warm up first
        if draw.random() < 0.2:
            actor.generate_sequences(SimpleNamespace(step=-draw.randint(0, 3)))
            assert pools.evaluated[-1] == pools.version, "an evaluation is of the newest policy"
    return pools, staleness, done + 1, total


def test_no_response_is_staler_than_allowed() -> None:
    draw = random.Random(0)
    seen = set()
    for _ in range(SCHEDULES):
        pools, staleness, first, last = run(draw)
        assert sorted(pools.written) == list(range(first, last + 1)), "each step once, and none that is not trained"
        seen.add(staleness)
    assert seen == set(range(6))


def test_what_is_finished_ahead_is_counted_in_whole_batches_and_in_tokens() -> None:
    """Step 4 is whole, one of two ranks has written its part of step 5, and nobody anything of step 6."""

    def message(step: int, tokens: float | None) -> Message:
        ended = (
            None if tokens is None else [Outcome(0, None, Report()), Outcome(1, None, Report(sums={"tokens": tokens}))]
        )
        return cast("Message", SimpleNamespace(step=step, outcomes=lambda: ended))

    messages = [message(*each) for each in ((4, 10.0), (4, 5.0), (5, None), (5, 7.0), (6, None))]
    assert queue(messages) == {"queue/batches": 1, "queue/tokens": 22.0}
    assert queue([]) == {"queue/batches": 0, "queue/tokens": 0}
