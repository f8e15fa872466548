"""Review of an attempt's placement: measured steps are compared once with the predictions of all placements."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rlhf_operator.placement.map_job import better
from rlhf_operator.placement.review import measured
from rlhf_operator.reconcile import finish, line
from rlhf_operator.reconcile.context import ReconcileContext

BETTER: Final = "BetterPlacement"


def review_placement(ctx: ReconcileContext) -> None:
    """Record the measured steps, report a better placement, and end the attempt for it if the job wants that."""
    beat, mapping = ctx.snapshot.current_heartbeat(), ctx.status.mapping
    progress = beat.status.progress if beat else None
    if progress is None or progress.pace is None or mapping is None or ctx.job is None or ctx.record is None:
        return
    ctx.set_status(mapping=mapping.model_copy(update={"measured_step_seconds": progress.pace.step_seconds}))
    report = ctx.record.measured
    if report is None:
        ctx.require_live("what steps took is compared with predictions")
        report = measured(ctx.job, mapping, progress.pace, progress.step, ctx.snapshot, ctx.settings)
        ctx.set_record(measured=report)
        seen = replace(ctx.snapshot, job=replace(ctx.snapshot.job, status=ctx.status))
        _report(ctx, better(ctx.job, mapping, seen, ctx.settings))
    mapped, saved = ctx.condition("Mapped"), ctx.status.checkpoint
    is_reported = mapped is not None and mapped.reason == BETTER
    has_saved = saved is not None and saved.step > report.step
    # With jobs ahead in line, the room of the ended attempt would go to them.
    if is_reported and has_saved and _can_remap(ctx) and not line.jobs_ahead(ctx):
        finish.remap(ctx)


def _report(ctx: ReconcileContext, placement: str) -> None:
    mapped = ctx.condition("Mapped")
    if placement:
        what = "it is taken at the next checkpoint" if _can_remap(ctx) else "suspend the job and resume it to take it"
        message = f"Another placement is better: {placement}; {what}."
        ctx.set_condition("Mapped", "True", BETTER, message)
        ctx.add_event("Normal", BETTER, message)
    elif mapped is not None and mapped.reason == BETTER:  # an earlier attempt's report is taken back
        ctx.set_condition("Mapped", "True", "Mapped", "By what steps took no other placement is much better.")


def _can_remap(ctx: ReconcileContext) -> bool:
    """Whether the job may still end an attempt for a better placement, which it does once at most."""
    is_enabled = ctx.job is not None and ctx.job.spec.placement.remap == "AtCheckpoint"
    return is_enabled and not any(each.outcome == "Remapped" for each in ctx.status.attempts)
