"""Sandboxes of the running attempt: the Job of their pods, the deletion of used pods, and a condition about them."""

from collections.abc import Sequence
from typing import Final

from rlhf_operator import names
from rlhf_operator.actions import Create, Delete
from rlhf_operator.reconcile import attempt_status
from rlhf_operator.reconcile.context import ReconcileContext
from rlhf_operator.resources import sandboxes
from rlhf_operator.snapshot import ObservedPod

ENDED: Final = ("Succeeded", "Failed")
"""Phases of a sandbox that has served; Kubernetes keeps such pods of a Job."""


def keep(ctx: ReconcileContext) -> None:
    """Have the sandboxes of a running attempt made as soon as its pods are ready, if its job asks for some."""
    rayjob, asked = ctx.snapshot.current_rayjob(), ctx.job.spec.sandbox if ctx.job else None
    if ctx.job is None or asked is None or rayjob is None or not ctx.holds("ClusterReady"):
        return
    own = [pod for pod in ctx.snapshot.sandboxes if pod.name.startswith(f"{names.sandboxes_name(rayjob.name)}-")]
    if not own:  # at first, and if somebody has deleted them
        ctx.require_live("the sandboxes of the attempt are made")
        made = sandboxes.manifests(ctx.snapshot.job, rayjob, ctx.job, ctx.settings)
        ctx.actions.extend(Create(manifest=each) for each in made)
        ctx.requeue_after(attempt_status.PATIENCE_SECONDS)
    ended = [pod for pod in own if pod.phase in ENDED and pod.deleting_since is None]
    if len(ended) >= asked.warm or (ctx.snapshot.fresh and ended):  # together: each time needs live reads
        ctx.require_live("sandboxes that have served are deleted")
        ctx.actions.extend(Delete(kind="Pod", name=pod.name, uid=pod.uid) for pod in ended)
    if problem := _problem(ctx, own):
        ctx.set_condition("SandboxesReady", "False", "SandboxesWait", problem)
        ctx.requeue_after(attempt_status.LOOK_AGAIN_SECONDS)
    elif any(pod.ready for pod in own):
        ctx.set_condition("SandboxesReady", "True", "SandboxesRun", "Sandboxes run code of the model.")
    elif not ctx.holds("SandboxesReady"):
        ctx.set_condition("SandboxesReady", "False", "Starting", "The sandboxes are being made.")


def _problem(ctx: ReconcileContext, own: Sequence[ObservedPod]) -> str:
    """Return why sandboxes do not start, a sentence; empty if they do. Used ones may hold their room for a moment."""
    if not own and ctx.snapshot.complaint:
        return attempt_status.refusal(ctx.snapshot.complaint)[1]
    for pod in own:
        found = attempt_status.start_problem(pod) if pod.phase == "Pending" else None
        patience = attempt_status.SLOW_START_SECONDS if pod.unschedulable else 0.0
        if found and not ctx.must_wait(patience - ctx.age(pod.created)):
            return found[1]
    return ""
