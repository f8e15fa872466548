"""Tree of a model's lineage, from the statuses of a namespace's jobs."""

from collections.abc import Mapping, Sequence
from typing import Final

from rich.text import Text
from rich.tree import Tree

from rlhf_api.exit_codes import ExitCode
from rlhf_api.problems import suggestion
from rlhf_api.status import ReadInput
from rlhf_kubectl.kubectl import KubectlError
from rlhf_operator.cluster import raw
from rlhf_operator.snapshot import ObservedJob

MADE_FROM, READ_BY = "made from", "read by"
DIGITS: Final = 12
"""Digits of a digest or a commit that are shown."""
WIDTH: Final = 10_000
"""Columns of the tree, more than a terminal has: rich leaves out branches that are deeper than the columns."""


def tree(jobs: Sequence[ObservedJob], wanted: str) -> Tree:
    """Return the tree of a job, or of a URI: that of a job's output, or of a model or data set that jobs read.

    KubectlError if no status names it.
    """
    by_name = {job.name: job for job in jobs}
    makers = [job for job in jobs if job.name == wanted or (job.status.output and job.status.output.uri == wanted)]
    root, others = Tree(Text(wanted)), [job for job in jobs if any(each.uri == wanted for each in job.status.inputs)]
    if makers:
        root = Tree(_made(makers[0]))
        _add_inputs(root.add(MADE_FROM), makers[0], by_name, {makers[0].name})
        others = [job for job in jobs if any(_is_from(each, makers[0]) for each in job.status.inputs)]
    elif not others:
        near = suggestion(wanted, list(by_name))
        raise KubectlError(f"no status of a job names {wanted}: {near}", ExitCode.SPEC, "NotFound")
    if others:
        branch = root.add(READ_BY)
        shown = {maker.name for maker in makers}
        for job in others:
            _add_reader(branch, job, jobs, shown)
    return root


def _add_inputs(branch: Tree, job: ObservedJob, by_name: Mapping[str, ObservedJob], shown: set[str]) -> None:
    """Add the inputs of a job, and below each the maker with its inputs; shown: names of jobs in the tree, extended.

    Each maker is shown once: actor and reference of one maker would double the tree with each round of a chain.
    """
    if not job.status.inputs:
        branch.add(Text("unknown: no attempt has begun to train, or it was one of an earlier release"))
    for each in job.status.inputs:
        maker = by_name.get(each.job or "")
        below = branch.add(Text(f"{each.name}: {each.uri}{_content(each.digest, each.revision)}{_note(each, maker)}"))
        if maker and maker.name not in shown:
            shown.add(maker.name)
            _add_inputs(below.add(_made(maker)), maker, by_name, shown)
        elif maker:
            below.add(Text(f"{maker.name}, as above"))


def _add_reader(branch: Tree, job: ObservedJob, jobs: Sequence[ObservedJob], shown: set[str]) -> None:
    """Add a job, and below the readers of its output; shown: names of jobs in the tree, extended here."""
    if job.name in shown:
        branch.add(Text(f"{job.name}, as above"))
        return
    shown.add(job.name)
    below = branch.add(_made(job))
    for other in jobs:
        if any(_is_from(each, job) for each in other.status.inputs):
            _add_reader(below, other, jobs, shown)


def _is_from(read: ReadInput, job: ObservedJob) -> bool:
    return read.job == job.name or bool(job.status.output and read.uri == job.status.output.uri)


def _made(job: ObservedJob) -> Text:
    """Return a line on a job with its algorithm, and its output or its phase."""
    output, algorithm = job.status.output, raw.text(job.spec, "algorithm", "name")
    made = f" made {output.uri}{_content(output.digest)}" if output else f" is {job.status.phase}"
    return Text(f"{job.name} ({algorithm}){made}")


def _content(digest: str | None, revision: str | None = None) -> str:
    kind, colon, number = (digest or "").partition(":")
    shown = f", {kind}{colon}{number[:DIGITS]}" if digest else ""
    return shown + (f" at {revision[:DIGITS]}" if revision else "")


def _note(read: ReadInput, maker: ObservedJob | None) -> str:
    """Return what is odd about an input that a job made; empty if nothing is."""
    if read.job and maker is None:
        return "; the job is gone"
    now = maker.status.output.digest if maker and maker.status.output else None
    return "; the job has made something else since" if now and read.digest and now != read.digest else ""
