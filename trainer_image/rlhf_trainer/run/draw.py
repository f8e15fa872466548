"""`rlhf plan --graph`: the calls of a step under a mapping, as text and as a picture; the workers need torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from rlhf_api.job import Job
from rlhf_mapper.mapping import DeviceMapping
from rlhf_trainer.run.folder import written
from rlhf_trainer.run.graph import graph_of
from rlhf_trainer.run.graph_svg import svg_of
from rlhf_trainer.run.graph_text import LEGEND, text_of


def draw(found: Sequence[tuple[Job, DeviceMapping]], svg: Path | None) -> None:
    """Print the graph of each job's step, and draw that of the only one into a file."""
    for job, placed in found:
        graph, title = graph_of(job, placed), title_of(job, placed)
        typer.echo(f"{text_of(graph, title=title)}\n")
        if svg:
            with written(svg):
                svg.write_text(svg_of(graph, title=title, pools=[pool.name for pool in placed.pools]))
            typer.echo(f"drawn into {svg}\n")
    if found:
        typer.echo(LEGEND)


def title_of(job: Job, placed: DeviceMapping) -> str:
    """The job, its algorithm, and who lives where."""
    pools = "; ".join(f"{pool.name}: {placed.described(pool)}" for pool in placed.pools)
    return f"{job.name}, a step of {job.spec.algorithm.name}. {pools}"
