"""Responses that were lost after they had ended, before trainers read them, are generated again."""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from rlhf_trainer.controller.batch import BatchFuture
from rlhf_trainer.controller.call_log import CallDeadline
from rlhf_trainer.run.on_ray import ReplaceablePool
from rlhf_trainer.run.step_models import ApartRollout, RolloutPool

ROWS = 6


class Forgetful(RolloutPool):
    """Loses the first responses, after they have ended."""

    def __init__(self) -> None:
        self.asked = 0

    def calls(self) -> AbstractContextManager[None]:
        return nullcontext()

    def has_lost(self, responses: Any) -> bool:  # noqa: ARG002
        self.asked += 1
        return self.asked == 1


def test_lost_responses_are_generated_again() -> None:
    calls: list[str] = []
    actor = SimpleNamespace(send_weights=lambda: calls.append("weights"))

    def generate(batch: BatchFuture) -> BatchFuture:
        calls.append(f"step {batch.step}")
        return batch

    rollout = SimpleNamespace(receive_weights=lambda: None, generate_sequences=generate)
    pool = Forgetful()
    apart = ApartRollout(actor, rollout, pool)
    apart.generate_ahead(BatchFuture(step=1, size=ROWS))
    apart.generate_ahead(BatchFuture(step=2, size=ROWS))
    assert apart.generate_sequences(BatchFuture(step=1, size=ROWS)).step == 1
    assert calls == ["weights", "step 1", "weights", "step 2", "weights", "step 1"]
    assert pool.repeated_rows == ROWS
    apart.generate_sequences(BatchFuture(step=2, size=ROWS))
    assert pool.repeated_rows == ROWS


def test_a_step_says_how_many_rows_were_generated_again() -> None:
    group: Any = SimpleNamespace(name="writers")
    machines: Any = SimpleNamespace(count=1)
    log: Any = None
    deadline = CallDeadline(1.0, predicted=None, least=0.0)
    pool = ReplaceablePool(group, log, deadline=deadline, build=lambda: None, machines=machines)
    assert not pool.drain().warnings
    pool.repeated_rows = ROWS
    assert list(pool.drain().warnings.values()) == ["rollout pool writers lost processes; 6 rows were generated again"]
    assert not pool.drain().warnings
