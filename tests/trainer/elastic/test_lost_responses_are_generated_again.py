"""Responses that were lost after they had ended, before trainers read them, are generated again."""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from rlhf_trainer.controller.batch import BatchFuture
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
