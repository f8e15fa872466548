"""Checks before a job may begin: spec, input jobs and named claims."""

from typing import Final

from rlhf_api import chain
from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from rlhf_operator import names
from rlhf_operator.placement.claim_size import too_small
from rlhf_operator.reconcile import finish
from rlhf_operator.reconcile.context import INPUT_NOT_READY, ReconcileContext
from rlhf_operator.resources.storage import run_folder
from rlhf_operator.snapshot import claims_named, inputs_of

LOST: Final = "SpecChangedByUpgrade"  # reason of Accepted=False


def accepted(ctx: ReconcileContext) -> Job | None:
    """Return the job if its spec is valid, KubeRay is installed and its claims fit; else None, and set a condition."""
    lost = ctx.snapshot.job.lost_fields
    if _is_edited_since_told(ctx):
        ctx.set_status(accepted_losses=lost)
    if missed := ", ".join(path for path in lost if path not in ctx.status.accepted_losses):
        what_to_do = "write it in its new place, as the chart's README says, or edit the spec to go on without it"
        ctx.set_condition("Accepted", "False", LOST, f"an upgrade has dropped {missed}; {what_to_do}")
        return None
    if (obstacle := _obstacle(ctx)) is not None:
        ctx.set_condition("Accepted", "False", *obstacle)
        return None
    without = f", without {', '.join(lost)}, which this release does not know" if lost else ""
    ctx.set_condition("Accepted", "True", "Accepted", f"The spec is valid{without}.")
    return ctx.job


def _is_edited_since_told(ctx: ReconcileContext) -> bool:
    """Whether somebody has edited the spec since the condition Accepted said which fields it has lost."""
    told, seen = ctx.condition("Accepted"), ctx.status.observed_generation or 0
    return told is not None and told.reason == LOST and seen < ctx.snapshot.job.generation


def conflict(ctx: ReconcileContext, name: str) -> bool:
    """Whether a RayJob of this name has another owner; a condition then reports it."""
    there = next((each for each in ctx.snapshot.rayjobs if each.name == name and not each.owned), None)
    if there is None:
        return False
    message = f"a RayJob named {name} is there and belongs to something else; delete it, or name the job otherwise"
    if there.deleting:
        message = f"RayJob {name} of an earlier job is deleted, and KubeRay has not let it go; see whether KubeRay runs"
    ctx.set_condition("Accepted", "False", "NameConflict", message)
    ctx.requeue_after(10.0)  # the deletion of another owner's RayJob causes no event
    return True


def ready(ctx: ReconcileContext, job: Job) -> bool:
    """Whether all input jobs have succeeded; this job fails if an input job has failed or does not fit."""
    needed = sorted(inputs_of(ctx.snapshot.job.spec))
    if circle := _circle(ctx, needed):
        finish.fail(ctx, "InvalidInput", f"spec: jobs wait for each other: {circle}")
        return False
    for name in needed:
        if name != job.name and name not in ctx.snapshot.inputs:
            message = f"no RLHFJob named {name} is in namespace {job.metadata.namespace}; create it"
            ctx.set_condition("InputsReady", "False", "InputMissing", message)
            return False
    if problem := _wrong_kind(ctx, job):
        finish.fail(ctx, "InvalidInput", problem)
        return False
    if not all(_has_succeeded(ctx, name) for name in needed):
        return False
    message = f"{', '.join(needed)} succeeded." if needed else "The job reads no other job."
    ctx.set_condition("InputsReady", "True", "InputsReady", message)
    return True


def _obstacle(ctx: ReconcileContext) -> tuple[str, str] | None:
    """Return (reason, sentence) of the first obstacle to the job's acceptance; None without an obstacle."""
    if ctx.job is None:
        return "InvalidSpec", ctx.problem
    if "kuberay" not in ctx.snapshot.capabilities:
        return "KubeRayMissing", "the cluster has no RayJobs (ray.io/v1); install KubeRay 1.6 or later"
    storage = ctx.job.spec.checkpoint.storage
    if storage is not None and storage.startswith("file://"):
        where = "a folder of a pod, which goes with it; take pvc://, s3:// or gs://, or leave it unset"
        return "InvalidSpec", f"spec.checkpoint.storage: {storage} is {where}"
    named, claims = claims_named(ctx.snapshot.job.spec), ctx.snapshot.claims
    if missing := named - claims.keys():
        name = min(missing)
        return "ClaimMissing", f"the spec names PersistentVolumeClaim {name}, which does not exist; create it"
    own = names.output_claim_name(ctx.job.name)
    made = claims.get(own)
    if own not in named and made is not None and not made.made_for(ctx.snapshot.job):
        what_to_do = "delete it or name the job otherwise"
        return "NameConflict", f"PersistentVolumeClaim {own} belongs to something else; {what_to_do}"
    place = claims.get(run_folder(ctx.job).claim)
    if ctx.status.attempt is None and place and (problem := too_small(ctx.job, place, ctx.snapshot)):
        return "ClaimTooSmall", f"spec.checkpoint.storage: {problem}"
    return None


def _wrong_kind(ctx: ReconcileContext, job: Job) -> str:
    """Return why the output of an input job does not fit its use in this job; empty if all fit."""
    kinds = {name: seen.algorithm for name, seen in ctx.snapshot.inputs.items() if seen.algorithm}
    unknown = inputs_of(ctx.snapshot.job.spec) - kinds.keys() - {job.name}
    if unknown:
        return ""  # an input whose own spec is broken is no fault of this job
    try:
        chain.in_order([job], {name: kind for name, kind in kinds.items() if name != job.name})
    except SpecError as error:
        return str(error)
    return ""


def _has_succeeded(ctx: ReconcileContext, name: str) -> bool:
    entry = ctx.snapshot.inputs[name]
    if entry.status.phase == "Failed":
        finish.fail(ctx, "InputFailed", f"{name}, which this job reads, failed; repair it and create both again")
        return False
    if entry.status.phase != "Succeeded" or not entry.output_uri:
        ctx.set_condition("InputsReady", "False", INPUT_NOT_READY, f"waits until {name} has succeeded")
        return False
    if gone := claims_named({"output": entry.output_uri}) - ctx.snapshot.claims.keys():
        message = f"PersistentVolumeClaim {min(gone)} with the output of {name} is gone; create {name} again"
        ctx.set_condition("InputsReady", "False", "ClaimMissing", message)
        return False
    return True


def _circle(ctx: ReconcileContext, needed: list[str]) -> str:
    """Return jobs that wait for each other and for this job, as `a -> b -> a`; empty without such a circle."""
    own = ctx.snapshot.job.name
    paths, seen = [[own, name] for name in needed if name != own], set(needed)
    while paths:
        path = paths.pop()
        entry = ctx.snapshot.inputs.get(path[-1])
        if entry is None or entry.status.phase == "Succeeded":
            continue
        for name in sorted(inputs_of(entry.spec)):
            if name == own:
                return " -> ".join([*path, own])
            if name not in seen:
                seen.add(name)
                paths.append([*path, name])
    return ""
