"""Over many random schedules no response is staler than allowed, and each step trains once on rows of its own."""

from __future__ import annotations

import random
import runpy
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rlhf_api.job import Job
from rlhf_trainer.controller.call_log import CallLog
from rlhf_trainer.controller.message import Message
from rlhf_trainer.controller.slot_process import Outcome
from rlhf_trainer.run.job_run import Lookahead, ModelRuntime
from rlhf_trainer.run.step_models import ApartRollout, RolloutPool
from rlhf_trainer.telemetry import Report
from rlhf_trainer.types import Batch
from rlhf_trainer.workers.actor import ActorWorker

FEW_SCHEDULES, SCHEDULES, MANY_SCHEDULES = 100, 500, 10_000


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


REPLAY = runpy.run_path(str(Path(__file__).parents[3] / "examples/own/replay.py"))
"""An own algorithm that learns from the last batches, too, and its actor."""
SAME = SimpleNamespace(compute_reward=lambda batch: batch, compute_advantage=lambda batch: batch)


class Replaying:
    """The step and the actor of examples/own/replay.py; looks at what each update learns from."""

    def __init__(self, batches: int, pools: Pools, done: int) -> None:
        """done: steps before this job goes on, each of which was trained on responses of the policy before it."""
        self.batches, self.pools, self.last = batches, pools, {step: [step - 1] for step in range(1, done + 1)}
        self.worker = object.__new__(REPLAY["ReplayingActor"])
        spec = SimpleNamespace(algorithm=SimpleNamespace(replayed_steps=batches - 1))
        self.worker.setting = SimpleNamespace(job=SimpleNamespace(spec=spec))
        self.worker.own_tensors, self.worker.compute_log_prob = {}, lambda _: {}
        for step in self.last:
            self._remember(SimpleNamespace(step=step))

    def step(self, batch: Any, actor: Any) -> int:
        """Take a step; return the most updates between a response and what has just learned from it."""
        handle = SimpleNamespace(
            generate_sequences=actor.generate_sequences, remember=self._remember, update_actor=self._update
        )
        REPLAY["Replay"].step(batch, actor=handle, reward=SAME, advantage=SAME)
        return self.pools.version - min(min(versions) for versions in self._kept(batch.step))

    def _kept(self, step: int) -> list[list[int]]:
        return [self.last[each] for each in range(max(1, step - self.batches + 1), step + 1)]

    def _remember(self, batch: Any) -> None:
        versions = self.last.setdefault(batch.step, self.pools.written.get(batch.step, []))
        rows = torch.tensor([[0] * len(versions), versions])  # of two ranks
        self.worker.remember(Batch(step=batch.step, start=0, size=2, fields=dict.fromkeys(REPLAY["KEPT"], rows)))

    def _update(self, batch: Any) -> None:
        """Have the second rank update: its row of each kept batch is learned once."""
        learned: list[Batch] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ActorWorker, "update_actor", lambda _, joined: learned.append(joined))
            self.worker.update_actor(Batch(step=batch.step, start=1, size=1))
        kept = self._kept(batch.step)
        width = max(map(len, kept))
        assert (learned[0].start, learned[0].size) == (len(kept), len(kept))
        padded = sorted([*versions, *[0] * (width - len(versions))] for versions in kept)
        assert sorted(learned[0]["policy_version"].tolist()) == padded


def run(draw: random.Random, *, replays: bool = False) -> tuple[Pools, int, int, int]:
    """A job of random length that allows some staleness, begins at some step and is evaluated in between.

    Returns what its pools did, the staleness that is allowed, its first step and its last. replays: it is one of
    an own algorithm, which learns from several batches.
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
    own = Replaying(draw.randint(1, 4), pools, done) if replays else None
    for step in range(done + 1, total + 1):
        batch = lookahead.batch(step)
        assert batch.step == step
        if own:
            assert own.step(batch, actor) <= staleness + own.batches - 1
        else:
            actor.generate_sequences(batch)
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


@pytest.mark.parametrize(
    ("schedules", "replays"),
    [
        (SCHEDULES, False),
        (FEW_SCHEDULES, True),
        *(pytest.param(MANY_SCHEDULES, each, marks=pytest.mark.slow) for each in (False, True)),
    ],
)
def test_no_response_is_staler_than_allowed(schedules: int, replays: bool) -> None:
    draw = random.Random(0)
    seen, met = set(), Counter[str | None]()
    for _ in range(schedules):
        pools, staleness, first, last = run(draw, replays=replays)
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
