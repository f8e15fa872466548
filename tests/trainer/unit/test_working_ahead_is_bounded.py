"""Over many random schedules no response is staler than allowed, and each step trains once on rows of its own."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlhf_api.job import Job
from rlhf_trainer.controller.call_log import CallLog
from rlhf_trainer.controller.message import Message
from rlhf_trainer.controller.slot_process import Outcome
from rlhf_trainer.run.job_run import Lookahead, ModelRuntime
from rlhf_trainer.run.step_models import ApartRollout, RolloutPool
from rlhf_trainer.telemetry import Report

SCHEDULES, MANY_SCHEDULES = 500, 10_000


@dataclass
class Pools(RolloutPool):
    """What would be done by two pools: the one that trains makes the calls, the other writes tokens in between."""

    draw: random.Random
    version: int = 0
    """Updates of the policy so far."""
    partial: str | None = None
    sent: int = -1
    """The version of the weights that the generators have."""
    asked: dict[int, int] = field(default_factory=dict)
    """Step -> the tokens of its responses, when they have ended; in the order in which they are written."""
    written: dict[int, list[int]] = field(default_factory=dict)
    """Step -> the version that wrote each of them."""
    met: int = 0
    """How often weights came while responses were written."""

    def send_weights(self) -> None:
        self.write(self.draw.randint(0, 30))
        under_way = next((step for step, tokens in self.asked.items() if len(self.written[step]) < tokens), None)
        if under_way is not None and self.version != self.sent:
            assert self.partial, "weights wait for responses"
            self.met += bool(self.written[under_way])
            if self.partial == "Restart":
                self.written[under_way] = []
        self.sent = self.version

    def receive_weights(self) -> None:
        pass

    def generate_sequences(self, batch: Any) -> Any:
        assert batch.step <= 0 or batch.step not in self.asked, "the same prompts twice"
        self.asked.pop(batch.step, None)
        self.asked[batch.step], self.written[batch.step] = self.draw.randint(1, 20), []
        return batch

    def settle(self, step: int | None = None) -> None:
        while any(len(self.written[each]) < self.asked[each] for each in ([step] if step is not None else self.asked)):
            self.write(1)

    def write(self, tokens: int) -> None:
        """So many, or all that were asked for."""
        for step, wanted in self.asked.items():
            now = min(tokens, wanted - len(self.written[step]))
            self.written[step] += [self.sent] * now
            tokens -= now


def run(draw: random.Random) -> tuple[Pools, int, int, int]:
    """A job of random length that allows some staleness, begins at some step and is evaluated in between.

    Returns what its pools did, the staleness that is allowed, its first step and its last.
    """
    staleness, done, total = draw.randint(0, 5), draw.randint(0, 20), draw.randint(1, 40)
    total += done
    pools = Pools(draw, version=done, partial=draw.choice((None, "Continue", "Restart")) if staleness else None)
    actor = ApartRollout(pools, pools, pools, interrupts=pools.partial is not None)
    data = SimpleNamespace(load_batch=lambda batch: batch)
    runtime = SimpleNamespace(
        models={"data": data, "actor": actor}, blank=lambda step, size: SimpleNamespace(step=step, size=size)
    )
    spec = SimpleNamespace(rollout=SimpleNamespace(max_staleness=staleness))
    job = SimpleNamespace(spec=spec, sequences_per_step=4)
    lookahead = Lookahead(cast("Job", job), cast("ModelRuntime", runtime), first_step=done + 1, total_steps=total)
    for step in range(done + 1, total + 1):
        batch = actor.generate_sequences(lookahead.batch(step))
        assert batch.step == step
        versions = pools.written[step]
        assert len(versions) == pools.asked[step], "they have ended"
        assert versions == sorted(versions)
        assert pools.version - versions[0] <= staleness
        assert pools.partial == "Continue" or versions[0] == versions[-1]
        assert len([later for later in pools.asked if later > step]) <= staleness, "the queue is bounded"
        pools.version += draw.random() < 0.9  # critics may warm up first
        if draw.random() < 0.2:
            evaluated = -draw.randint(0, 3)
            actor.generate_sequences(SimpleNamespace(step=evaluated))
            assert set(pools.written[evaluated]) == {pools.version}, "an evaluation is of the newest policy"
    return pools, staleness, done + 1, total


@pytest.mark.parametrize("schedules", [SCHEDULES, pytest.param(MANY_SCHEDULES, marks=pytest.mark.slow)])
def test_no_response_is_staler_than_allowed(schedules: int) -> None:
    draw = random.Random(0)
    seen, met = set(), Counter[str | None]()
    for _ in range(schedules):
        pools, staleness, first, last = run(draw)
        steps = sorted(step for step in pools.written if step > 0)
        assert steps == list(range(first, last + 1)), "each step once, and none that is not trained"
        seen.add(staleness)
        met[pools.partial] += pools.met
    assert seen == set(range(6))
    assert met["Continue"] > schedules
    assert met["Restart"] > schedules
    assert not met[None]


def test_what_is_finished_ahead_is_counted() -> None:
    """Step 4 is whole, one of two ranks has written its part of step 5, and nobody anything of step 6."""

    def message(step: int, tokens: float | None) -> Message:
        ended = (
            None if tokens is None else [Outcome(0, None, Report()), Outcome(1, None, Report(sums={"tokens": tokens}))]
        )
        return cast("Message", SimpleNamespace(step=step, outcomes=lambda: ended))

    messages = [message(*each) for each in ((4, 10.0), (4, 5.0), (5, None), (5, 7.0), (6, None))]
    log = CallLog()
    assert log.queue() == {"queue/batches": 0, "queue/tokens": 0}
    log.messages += messages
    assert log.queue() == {"queue/batches": 1, "queue/tokens": 22.0}
