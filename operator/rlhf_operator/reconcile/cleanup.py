"""Deletion of RayJobs and pods of ended attempts, and the owner of the claim that may outlive the job."""

from typing import Final

from rlhf_api.names import KIND
from rlhf_operator import names, observed_attempt
from rlhf_operator.actions import Delete, SetOwner
from rlhf_operator.reconcile.context import ReconcileContext
from rlhf_operator.resources import storage
from rlhf_operator.snapshot import ObservedPod

GIVE_UP_SECONDS: Final = 120.0
"""Seconds for which a node may be not ready before its terminating pods are deleted by force.

A pod deleted by force may still run, but cannot harm the next attempt. The next attempt has its own Ray cluster, and
owns the run folder, so that an older attempt writes nothing there (`rlhf_trainer.run_folder.lock`).
"""
FORCE_SECONDS: Final = 300.0
"""Seconds beyond its grace period after which a pod counts as dead where nothing tells whether its node is ready."""
LOOK_AGAIN_SECONDS: Final = 30.0
"""Seconds after which the owner of a claim is set again if the API server refused the change."""
OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
"""Taint by which an administrator says that a node is off, so that nothing can run there."""


def clear(ctx: ReconcileContext) -> bool:
    """Delete all RayJobs of the job, and its pods on dead nodes; return whether no RayJob and no pod is left."""
    delete_rayjobs(ctx, but=None)
    for pod in (*ctx.snapshot.pods, *ctx.snapshot.readers, *ctx.snapshot.sandboxes):
        wait = _until_forced(ctx, pod)
        if wait is not None and wait <= 0:
            ctx.require_live(f"pod {pod.name} is deleted by force")
            ctx.actions.append(Delete(kind="Pod", name=pod.name, uid=pod.uid))
            why = f"node {pod.node} is gone, out of service, or not ready for {GIVE_UP_SECONDS:.0f} s"
            ctx.add_event("Warning", "PodGivenUp", f"Pod {pod.name} is deleted by force: {why}.")
        if wait is not None:
            ctx.requeue_after(max(wait, FORCE_SECONDS / 10))
    return not ctx.snapshot.pods and not any(each.owned for each in ctx.snapshot.rayjobs)


def is_kept(ctx: ReconcileContext) -> bool:
    """Whether the pods of a failed job's last attempt stay for debugging, as runPolicy.keepPodsOnFailure says."""
    last = ctx.snapshot.current_rayjob()
    has_failed = ctx.holds("Failed") and ctx.record is not None and ctx.record.reason is not None
    return ctx.policy.keep_pods_on_failure and has_failed and last is not None and not last.deleting


def delete_rayjobs(ctx: ReconcileContext, *, but: str | None) -> None:
    """Delete the job's RayJobs, except the one of this name."""
    for each in ctx.snapshot.rayjobs:
        if each.owned and not each.deleting and each.name != but:
            ctx.require_live(f"RayJob {each.name} is deleted")
            ctx.actions.append(Delete(kind="RayJob", name=each.name, uid=each.uid))


def keep_claim(ctx: ReconcileContext) -> None:
    """Set whether the claim made for the job is deleted with the job, as spec.storage.retain says.

    The job is not deleted before this is done. A claim that an earlier job of the same name left is kept.
    """
    claim = ctx.snapshot.claims.get(names.output_claim_name(ctx.snapshot.job.name))
    if ctx.job is None or claim is None or not (storage.has_own_claim(ctx.job) and claim.made_for(ctx.snapshot.job)):
        return
    is_own = claim.maker == ctx.snapshot.job.uid
    goes = is_own and storage.goes_with(ctx.job, has_succeeded=ctx.holds("Complete"))
    if goes != claim.owned:
        ctx.require_live(f"claim {claim.name} is {'to go' if goes else 'kept'}")
        ctx.actions = [each for each in ctx.actions if not (isinstance(each, Delete) and each.kind == KIND)]
        ctx.actions.append(SetOwner(claim=claim.name, owned=goes))
        ctx.requeue_after(LOOK_AGAIN_SECONDS)


def _until_forced(ctx: ReconcileContext, pod: ObservedPod) -> float | None:
    """Return the seconds until a pod is deleted by force; None if it is not terminating, or its kubelet can end it."""
    if pod.deleting_since is None or not pod.node:
        return None
    node = observed_attempt.node_of(pod, ctx.snapshot)
    is_off = node is not None and any(key == OUT_OF_SERVICE for key, _, _ in node.taints)
    if is_off or observed_attempt.node_is_gone(pod, ctx.snapshot):
        return 0.0
    if (begun := observed_attempt.silent_since(pod, ctx.snapshot)) is not None:
        return GIVE_UP_SECONDS - ctx.age(max(begun, ctx.snapshot.watching_since))
    if node is not None or not (pod.phase == "Unknown" or pod.disruption):
        return None
    return pod.grace_seconds + FORCE_SECONDS - ctx.age(max(pod.deleting_since, ctx.snapshot.watching_since))
