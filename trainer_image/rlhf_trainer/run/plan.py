"""`rlhf plan`: what a run of a manifest would do on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import typer

from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_mapper.mapping import Inventory, Mapping
from rlhf_mapper.place import place
from rlhf_trainer.run.folder import written
from rlhf_trainer.run.graph import graph_of
from rlhf_trainer.run.graph_svg import svg_of
from rlhf_trainer.run.graph_text import LEGEND, text_of


def draw(jobs: Sequence[Job], *, only: str | None, svg: Path | None) -> None:
    """Print the graph of each job's step, or of one's, and draw that one into a file; SpecError if there is none."""
    names = ", ".join(job.name for job in jobs)
    chosen = [job for job in jobs if only in (None, job.name)]
    if not chosen:
        raise SpecError([Problem("JOB", f"is {only}; the manifest has {names}")])
    if svg and len(chosen) > 1:
        raise SpecError([Problem("--svg", f"draws one job; name one of {names}")])
    here = Inventory(gpus_per_machine=(torch.cuda.device_count(),))
    for job in chosen:
        placed = place(job, here)
        graph, title = graph_of(job, placed), title_of(job, placed)
        typer.echo(f"{text_of(graph, title=title)}\n")
        if svg:
            with written(svg):
                svg.write_text(svg_of(graph, title=title, pools=[pool.name for pool in placed.pools]))
            typer.echo(f"drawn into {svg}\n")
    typer.echo(LEGEND)


def title_of(job: Job, placed: Mapping) -> str:
    """The job, its algorithm, and who lives where."""
    pools = "; ".join(f"{pool.name}: {placed.described(pool)}" for pool in placed.pools)
    return f"{job.name}, a step of {job.spec.algorithm.name}. {pools}"
