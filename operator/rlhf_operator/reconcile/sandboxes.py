"""Sandboxes of the running attempt: makes and deletes their pods, and sets a condition about them.

Ended pods are deleted, except the newest ones if they failed at their start: they show why no sandbox runs.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from rlhf_operator import names
from rlhf_operator.actions import Create, Delete
from rlhf_operator.reconcile import attempt_status
from rlhf_operator.reconcile.context import ReconcileContext
from rlhf_operator.resources import sandboxes
from rlhf_operator.snapshot import ObservedPod

ENDED: Final = ("Succeeded", "Failed")
START_SECONDS: Final = 10.0
"""Seconds after a pod's creation that are its start, and the pause once the last `warm` pods failed at their start."""


def keep(ctx: ReconcileContext) -> None:
    """Keep `warm` sandboxes from the time at which the attempt's pods are ready, if its job asks for some."""
    rayjob, asked = ctx.snapshot.current_rayjob(), ctx.job.spec.sandbox if ctx.job else None
    if ctx.job is None or asked is None or rayjob is None or not ctx.holds("ClusterReady"):
        return
    name = names.sandboxes_name(rayjob.name)
    newest_first = sorted(ctx.snapshot.sandboxes, key=_number, reverse=True)
    own = [pod for pod in newest_first if pod.name.startswith(f"{name}-")]
    failed = [*takewhile(_failed_at_start, (pod for pod in own if pod.phase in ENDED))][: asked.warm]
    all_fail = len(failed) == asked.warm
    lacking = asked.warm - sum(pod.phase not in ENDED and pod.deleting_since is None for pod in own)
    if lacking > 0 and not (all_fail and ctx.must_wait(START_SECONDS - ctx.age(failed[0].created))):
        ctx.require_live("sandboxes are made")
        delete(ctx, [pod for pod in own if pod.phase in ENDED and pod not in failed])
        first = _number(own[0]) + 1 if own else 1
        numbers = range(first, first + lacking)
        made = sandboxes.manifests(ctx.snapshot.job, rayjob, ctx.job, ctx.settings, numbers)
        # All objects are created at first, and again if somebody has deleted all pods.
        ctx.actions.extend(Create(manifest=each) for each in made if not own or each["kind"] == "Pod")
    _set_ready(ctx, own, failed if all_fail else [], name)


def delete(ctx: ReconcileContext, pods: Sequence[ObservedPod]) -> None:
    """Delete sandboxes, unless they are being deleted."""
    for pod in pods:
        if pod.deleting_since is None:
            ctx.require_live("sandboxes are deleted")
            ctx.actions.append(Delete(kind="Pod", name=pod.name, uid=pod.uid))


def _set_ready(ctx: ReconcileContext, own: Sequence[ObservedPod], failed: Sequence[ObservedPod], name: str) -> None:
    """Set SandboxesReady. failed: the last `warm` pods, newest first, if all failed at their start; else empty."""
    if problem := _problem(ctx, own, name):
        ctx.set_condition("SandboxesReady", "False", "SandboxesWait", problem)
        ctx.requeue_after(attempt_status.LOOK_AGAIN_SECONDS)
    elif any(pod.ready and not (failed and ctx.must_wait(START_SECONDS - ctx.age(pod.created))) for pod in own):
        ctx.set_condition("SandboxesReady", "True", "SandboxesRun", "Sandboxes run code of the model.")
    elif failed:
        message = f"The last {len(failed)} sandboxes failed at their start. {_end(failed[0])}"
        ctx.set_condition("SandboxesReady", "False", "SandboxesFail", message)
    elif not ctx.holds("SandboxesReady"):
        ctx.set_condition("SandboxesReady", "False", "Starting", "The sandboxes are being made.")


def _number(pod: ObservedPod) -> int:
    number = pod.name.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdigit() else 0


def _failed_at_start(pod: ObservedPod) -> bool:
    """Whether a pod failed and was not ready after its first START_SECONDS; the model's code may be to blame, too."""
    lasted = (pod.not_ready_since - pod.created).total_seconds() if pod.not_ready_since else 0.0
    return pod.phase == "Failed" and lasted < START_SECONDS


def _end(pod: ObservedPod) -> str:
    """Return a sentence that says how a pod failed."""
    found = [pod.reason, pod.message]
    for each in pod.containers:
        if each.exit_code is not None:
            found += [each.ended_reason, f"exit code {each.exit_code}", each.last_words]
    return f"Pod {pod.name}: {', '.join(filter(None, found))}."


def _problem(ctx: ReconcileContext, own: Sequence[ObservedPod], name: str) -> str:
    """Return a sentence on why sandboxes do not start; empty if they do. Ended ones may hold room for a moment."""
    refused = ctx.snapshot.refused
    if refused and f" {name}" in refused.message:
        return refused.message
    for pod in own:
        found = attempt_status.start_problem(pod) if pod.phase == "Pending" else None
        patience = attempt_status.SLOW_START_SECONDS if pod.unschedulable else 0.0
        if found and not ctx.must_wait(patience - ctx.age(pod.created)):
            return found[1]
    return ""
