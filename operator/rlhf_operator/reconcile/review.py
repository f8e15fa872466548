"""What steps took: once an attempt that is compared with the predictions of its placement and of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rlhf_operator.placement.map_job import better
from rlhf_operator.placement.review import measured
from rlhf_operator.reconcile import finish, line
from rlhf_operator.reconcile.context import ReconcileContext

BETTER: Final = "BetterPlacement"


def look(ctx: ReconcileContext) -> None:
    """Notes what steps took, names a placement that is better, and ends the attempt for it where the job wants that."""
    beat, have = ctx.snapshot.current_heartbeat(), ctx.status.mapping
    progress = beat.status.progress if beat else None
    if progress is None or progress.pace is None or have is None or ctx.job is None or ctx.record is None:
        return
    ctx.set_status(mapping=have.model_copy(update={"measured_step_seconds": progress.pace.step_seconds}))
    told = ctx.record.measured
    if told is None:
        ctx.require_live("what steps took is compared with predictions")
        told = measured(ctx.job, have, progress.pace, progress.step, ctx.snapshot, ctx.settings)
        ctx.set_record(measured=told)
        seen = replace(ctx.snapshot, job=replace(ctx.snapshot.job, status=ctx.status))
        _name(ctx, better(ctx.job, have, seen, ctx.settings))
    mapped, saved = ctx.condition("Mapped"), ctx.status.checkpoint
    is_named = mapped is not None and mapped.reason == BETTER
    # Its room would be for those before it in line.
    if is_named and _may_remap(ctx) and saved is not None and saved.step > told.step and not line.jobs_ahead(ctx):
        finish.remap(ctx)


def _name(ctx: ReconcileContext, placement: str) -> None:
    """Say which placement is better; where that was said of an earlier attempt, that none is any more."""
    mapped = ctx.condition("Mapped")
    if placement:
        what = "it is taken at the next checkpoint" if _may_remap(ctx) else "suspend the job and resume it to take it"
        message = f"Another placement is better: {placement}; {what}."
        ctx.set_condition("Mapped", "True", BETTER, message)
        ctx.add_event("Normal", BETTER, message)
    elif mapped is not None and mapped.reason == BETTER:
        ctx.set_condition("Mapped", "True", "Mapped", "By what steps took no other placement is much better.")


def _may_remap(ctx: ReconcileContext) -> bool:
    """Whether the job may end an attempt for a better placement; once in its life it does."""
    wants = ctx.job is not None and ctx.job.spec.placement.remap == "AtCheckpoint"
    return wants and not any(each.outcome == "Remapped" for each in ctx.status.attempts)
