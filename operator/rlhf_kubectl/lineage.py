"""Tree of a model's lineage, from the statuses of a namespace's jobs."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from rich.text import Text
from rich.tree import Tree

from rlhf_api.exit_codes import ExitCode
from rlhf_api.problems import suggestion
from rlhf_api.status import ReadInput
from rlhf_kubectl.kubectl import KubectlError
from rlhf_operator.snapshot import ObservedJob

DIGITS: Final = 12
"""Digits of a digest or a commit that are shown."""
WIDTH: Final = 10_000
"""Columns of the tree, more than a terminal has: rich leaves out branches that are deeper than the columns."""
Lines = Iterable[tuple[str, ObservedJob | None]]
"""Lines below a job in the tree: (text, job whose own lines follow below the text, or None)."""


def tree(jobs: Sequence[ObservedJob], requested: str) -> Tree:
    """Return the tree of a job: the inputs of its model, and the jobs that read it. KubectlError without the job.

    requested: name of the job, or the URI of its output.
    """
    by_name = {job.name: job for job in jobs}
    made = next((job for job in jobs if requested in (job.name, job.output_uri or None)), None)
    if made is None:
        near = suggestion(requested, list(by_name))
        raise KubectlError(f"no status of a job names {requested}: {near}", ExitCode.SPEC, "NotFound")

    def inputs(job: ObservedJob) -> Lines:
        for each in job.status.inputs:
            maker = by_name.get(each.job or "")
            yield f"{each.name}: {each.uri}{_content(each.digest, each.revision)}{_note(each, maker)}", maker
        if not job.status.inputs:
            yield "unknown: no attempt has begun to train, or it was one of an earlier release", None

    def readers(job: ObservedJob) -> Lines:
        for other in jobs:
            if names := [
                each.name for each in other.status.inputs if job.name == each.job or job.output_uri == each.uri
            ]:
                yield ", ".join(names), other

    root = Tree(_made(made))
    _add(root.add("made from"), made, inputs, {made.name})
    if [*readers(made)]:
        _add(root.add("read by"), made, readers, {made.name})
    return root


def _add(branch: Tree, job: ObservedJob, lines_of: Callable[[ObservedJob], Lines], shown: set[str]) -> None:
    """Add a job's lines to a branch, and the lines of the jobs that these name. Extends `shown`, the jobs in the tree.

    Each job is expanded once: an actor and a reference of one job would double the tree with each job of a chain.
    """
    for line, other in lines_of(job):
        below = branch.add(Text(line))
        if other and other.name in shown:
            below.add(Text(f"{other.name}, as above"))
        elif other:
            shown.add(other.name)
            _add(below.add(_made(other)), other, lines_of, shown)


def _made(job: ObservedJob) -> Text:
    """Return a line on a job with its algorithm, and its output or its phase."""
    output = job.status.output
    made = f" made {output.uri}{_content(output.digest)}" if output else f" is {job.status.phase}"
    return Text(f"{job.name} ({job.algorithm}){made}")


def _content(digest: str | None, revision: str | None = None) -> str:
    kind, colon, number = (digest or "").partition(":")
    shown = f", {kind}{colon}{number[:DIGITS]}" if digest else ""
    return shown + (f" at {revision[:DIGITS]}" if revision else "")


def _note(read: ReadInput, maker: ObservedJob | None) -> str:
    """Return a clause that the maker of an input is gone, or has a newer output; else empty."""
    if read.job and maker is None:
        return "; the job is gone"
    now = maker.status.output.digest if maker and maker.status.output else None
    return "; the job has made something else since" if now and read.digest and now != read.digest else ""
