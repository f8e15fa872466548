"""What runs in the pods of a simulated cluster; the trainer is a step counter with the status a real one would have."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from rlhf_api.status import Failure, Metric, Output, Pace, Progress, ReadInput, SavedState, Status
from rlhf_operator import names
from rlhf_operator.snapshot import ObservedContainer, ObservedPod
from rlhf_operator.times import timestamp

START = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
TOTAL_STEPS = 50
DIGEST = f"sha256:{'0' * 64}"


@dataclass
class Trainer:
    """The driver of one attempt; it checkpoints every ten steps."""

    attempt: int
    first: int
    step: int
    phase: str = ""
    exit_code: int | None = None
    message: str = ""
    pod: str | None = None
    """That of the rank to blame."""
    stepped: datetime = START
    causes: tuple[str, ...] = ()


def containers(pod: ObservedPod) -> tuple[ObservedContainer, ...]:
    """Of a pod that a kubelet has started."""
    own = names.HEAD_CONTAINER if pod.role == names.CONTROLLER else names.WORKER_CONTAINER
    return (ObservedContainer(name=own, running=True),)


def words(trainer: Trainer, saved: int, saved_at: datetime, pace: Pace | None) -> Status:
    made = trainer.step - trainer.first
    stepped = timestamp(trainer.stepped)
    progress = Progress(step=trainer.step, total_steps=TOTAL_STEPS, stage="SFT", last_step_time=stepped, pace=pace)
    told = trainer.message or "it broke"
    failed = 0 < (trainer.exit_code or 0) <= 8
    return Status.model_construct(
        **{
            **dict(Status()),
            "phase": trainer.phase,
            "progress": progress if made else None,
            "metrics": (Metric(name="loss/sft", value=f"{1 / (1 + trainer.step):.6g}"),) if made else (),
            "inputs": (ReadInput(name="models.actor", uri="file:///rlhf/claims/x", digest=DIGEST),),
            "output": Output(uri="file:///rlhf/output/job/model", digest=DIGEST)
            if trainer.phase == "Succeeded"
            else None,
            "causes": trainer.causes,
            "links": (Metric(name="actor/product", value="0.1"),),
            "checkpoint": SavedState(step=saved, uri=f"/rlhf/output/job/checkpoints/{saved}", time=timestamp(saved_at))
            if saved
            else None,
            "last_failure": Failure(reason="X", exit_code=trainer.exit_code, message=told, pod=trainer.pod)
            if failed
            else None,
        }
    )
