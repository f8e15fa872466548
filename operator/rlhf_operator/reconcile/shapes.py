"""Reading of a custom algorithm and of model shapes by a pod of the job, because the operator cannot read them."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from rlhf_api.job import Job
from rlhf_api.problems import one_line
from rlhf_api.spec.custom_algorithm import AlgorithmFacts, Custom
from rlhf_api.status import ReadShape
from rlhf_mapper.config_file import ModelConfigError, architecture_in
from rlhf_operator import names
from rlhf_operator.actions import Create
from rlhf_operator.placement.shapes import Unread, unread
from rlhf_operator.reconcile import attempt_status, finish
from rlhf_operator.reconcile.context import ReconcileContext
from rlhf_operator.resources import reader
from rlhf_operator.snapshot import ObservedPod

LOOK_AGAIN_SECONDS: Final = 60.0
"""Seconds until the next look at the reader Job: no event tells that a Job without pods is gone."""
MAX_SHAPES: Final = 16
MAX_PROBLEM: Final = 300
"""Most bytes of a problem's text in the status."""
ANSWER_FIELDS: Final = ("shape", "problem", "weightBytes")
"""Fields of a reader's answer about a model."""


def are_read(ctx: ReconcileContext, job: Job) -> bool:
    """Whether algorithm and model shapes are known; if not, a pod reads them, and Mapped reports the progress."""
    algorithm = job.spec.algorithm
    if type(algorithm) is Custom:
        custom = {"entrypoint": algorithm.entrypoint, "options": algorithm.options}
        if ended := _ended_reader(ctx, job, custom, f"the algorithm {algorithm.entrypoint}"):
            _take_step(ctx, ended)
        return False
    models = unread(job, ctx.snapshot)
    if not models:
        return True
    request = [(each.at, each.revision) for each in models]
    what = ", ".join(one_line(each.uri, MAX_PROBLEM) for each in models)
    if ended := _ended_reader(ctx, job, request, f"the config.json of {what}"):
        ctx.set_status(shapes=(*ctx.status.shapes, *_answers(ended, models))[-MAX_SHAPES:])
    return False


def _take_step(ctx: ReconcileContext, ended: ObservedPod) -> None:
    """Take a pod's answer about a custom algorithm into the status; the job fails if the algorithm does not work."""
    words = _last_words(ended)
    try:
        answer = json.loads(words) if _has_read(ended) else {}
        if "problem" not in answer:
            ctx.set_status(step=AlgorithmFacts.model_validate(answer, by_alias=True, by_name=False))
            return
        problem = str(answer["problem"])
    except (ValueError, TypeError, RecursionError):
        problem = f"pod {ended.name} could not read it: {words.rpartition(chr(10))[2] or ended.message or ended.reason}"
    finish.fail(ctx, "InvalidInput", one_line(problem, MAX_PROBLEM))


def _ended_reader(ctx: ReconcileContext, job: Job, request: reader.ReadRequest, what: str) -> ObservedPod | None:
    """Have a reader pod answer `request`, and return the pod once it has ended. The condition Mapped reports this."""
    name = reader.name(ctx.snapshot, job, request)
    pods = [pod for pod in ctx.snapshot.readers if pod.name.startswith(f"{name}-")]
    # A pod that lost its node is made again.
    ended = [pod for pod in pods if _has_read(pod) or (pod.phase == "Failed" and not pod.disruption)]
    reason, message = "ReadingShapes", f"Job {name} reads {what}."
    if ended:
        ctx.requeue_after(0.0)  # the next pass maps
    elif not pods:
        ctx.require_live("shapes are read")
        ctx.actions.append(Create(manifest=reader.manifest(ctx.snapshot, job, ctx.settings, request)))
        if queue := ctx.snapshot.job.labels.get(names.QUEUE):
            message = f"{message} Queue {queue} has to admit it first."
        elif ctx.snapshot.complaint:
            reason, message = attempt_status.refusal(f"Job {name}: {ctx.snapshot.complaint}")
        else:
            ctx.requeue_after(attempt_status.PATIENCE_SECONDS)
        message = ctx.snapshot.refused.message if ctx.snapshot.refused else message
    elif problem := attempt_status.start_problem(pods[0]) or attempt_status.slow_start(ctx):
        message = f"{message} {problem[1]}"
    ctx.set_condition("Mapped", "False", reason, message)
    ctx.requeue_after(LOOK_AGAIN_SECONDS)
    return ended[0] if ended else None


def forget_problems(ctx: ReconcileContext) -> None:
    """Drop the problems of unreadable models, so that the next mapping reads these models again."""
    ctx.set_status(shapes=tuple(each for each in ctx.status.shapes if each.shape))


def _has_read(pod: ObservedPod) -> bool:
    """Whether the reader container has succeeded; containers that others put beside it may still run."""
    return any(each.name == names.READER and each.exit_code == 0 for each in pod.containers)


def _last_words(pod: ObservedPod) -> str:
    return next((each.last_words.strip() for each in pod.containers if each.name == names.READER), "")


def _answers(pod: ObservedPod, models: Sequence[Unread]) -> list[ReadShape]:
    words = _last_words(pod)
    if not _has_read(pod):
        why = words.rpartition("\n")[2] or pod.message or pod.reason or "it does not say why"
        return [_unknown(each, f"pod {pod.name} failed: {why}") for each in models]
    try:
        answers = json.loads(words)
        json.dumps(answers, ensure_ascii=False).encode()  # a lone surrogate is no text
    except (ValueError, RecursionError):
        answers = None
    if not isinstance(answers, list) or len(answers) != len(models):
        answers = [None] * len(models)
    return [_shape_in(each, answer, pod) for each, answer in zip(models, answers, strict=True)]


def _shape_in(model: Unread, answer: object, pod: ObservedPod) -> ReadShape:
    """Check a pod's answer about a model's shape, which user code may have written, and return it for the status."""
    fields = {name: answer[name] for name in ANSWER_FIELDS if name in answer} if isinstance(answer, dict) else {}
    document = {"uri": model.uri, "revision": model.revision, **fields}
    with suppress(ValueError, ModelConfigError):
        read = ReadShape.model_validate(document, by_alias=True, by_name=False)
        if read.shape:
            architecture_in(read.shape, "actor")
        if read.shape is not None or read.problem:
            return read.model_copy(update={"problem": read.problem and one_line(read.problem, MAX_PROBLEM)})
    return _unknown(model, f"what pod {pod.name} says of it cannot be read")


def _unknown(model: Unread, problem: str) -> ReadShape:
    return ReadShape(uri=model.uri, revision=model.revision, problem=one_line(problem, MAX_PROBLEM))
