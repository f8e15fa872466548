"""Run folders, written as a run writes them, and their pages, read as a browser reads them."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_mapper.mapping import DeviceMapping
from rlhf_trainer.commands.cli import app
from rlhf_trainer.report import plots
from rlhf_trainer.run_folder.evidence import RUN, Document, as_text
from rlhf_trainer.run_folder.folder import JobFolder, add_to_summary

ROOT = Path(__file__).parents[3]
SFT, RM, PPO = JOBS = load(ROOT / "examples" / "01-helpful-ppo.yaml")
VOID = {"meta", "link", "img", "br", "hr", "input"}


def drawn_once(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that draws a picture once for the same numbers."""
    drawn: dict[str, Any] = {}

    def found(*arguments: Any) -> Any:
        if (key := repr(arguments)) not in drawn:
            drawn[key] = draw(*arguments)
        return drawn[key]

    return found


@pytest.fixture(scope="module", autouse=True)
def same_pictures() -> Iterator[None]:
    """Let pages of the same run share their pictures, whose drawing is most of the time of a page."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("lines", "stack", "distributions"):
            patch.setattr(plots, name, drawn_once(getattr(plots, name)))
        yield


class Page(HTMLParser):
    """The elements and texts of a page; a section's text is under its id, the text before any section under ""."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = defaultdict(str)
        self.cells: list[list[str]] = []
        self.scripts: list[str] = []
        self._open: list[tuple[str, str]] = [("", "")]
        self.feed(html)
        self.close()
        assert self._open == [("", "")], f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        if tag not in VOID:
            self._open.append((tag, dict(attrs).get("id") or "" if tag == "section" else self._open[-1][1]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self._open]
        if {"style", "script"} & set(tags):
            self.scripts += [data] if "script" in tags else []
            return
        self.sections[self._open[-1][1]] += data
        if {"td", "th"} & set(tags):
            self.cells[-1][-1] += data

    def row(self, *beginning: str) -> list[str]:
        """The one row of a table that begins with these cells."""
        cleaned = [[" ".join(cell.split()) for cell in row] for row in self.cells]
        (found,) = [row for row in cleaned if row[: len(beginning)] == list(beginning)]
        return found


def report(*arguments: object) -> Result:
    """`rlhf report`, in this process."""
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def page_of(folder: Path) -> Page:
    """The page about a run folder."""
    done = report(folder)
    assert done.exit_code == 0, done.output
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def ppo_record(step: int) -> dict[str, float]:
    """What a step of PPO measures."""
    return {
        "step": step,
        "reward/mean": 1 + step / 10,
        "kl/reference": step / 100,
        "loss/policy": -0.001 * math.cos(step),
        "bytes/controller": 0.0,
        "time/step": 2.0,
        "time/generation": 0.5,
        "time/update": 1.0,
        "time/controller": 0.5,
    }


def sample(number: int, *, prompt: str = "How?", before: str = "Why?", after: str = "So.") -> dict[str, Any]:
    """A held-out row whose rule rises by `number`."""
    scores = {"reward_before": 0.5, "rule_before": 0.0, "reward_after": 1.5, "rule_after": float(number)}
    return {"prompt": f"{prompt} {number}", "response_before": before, "response_after": after, **scores}


def run_job(
    output: Path, job: Job, records: Iterable[dict[str, float]], mapping: DeviceMapping | None = None
) -> JobFolder:
    """A job's folder after some steps."""
    folder = JobFolder(output, job)
    folder.begin(None, inputs={}, mapping=mapping)
    folder.event(f"{job.spec.algorithm.name} on 2 CPU slots")
    for record in records:
        folder.record(record, total_steps=max(25, int(record["step"])), stage=job.spec.algorithm.name)
    return folder


def finish(output: Path, folder: JobFolder, **measured: float) -> None:
    """The job succeeds and its measurements stand in the summary."""
    folder.succeed()
    add_to_summary(output, folder.path.name, {"steps": 25, "seconds": 50.0, "seed": 0, **measured})


def write_attempt(job_folder: Path, **environment: object) -> None:
    """Write a run.json with one attempt."""
    attempt = {"began": "2026-01-01T00:00:00Z", "after": 0, **environment}
    (job_folder / RUN).write_text(as_text(Document(attempts=[attempt], read=[], made=[])))


@pytest.fixture
def chain(tmp_path: Path) -> Callable[[list[dict[str, Any]]], Path]:
    """Makes a finished run of the three jobs whose PPO left these samples."""

    def make(samples: list[dict[str, Any]]) -> Path:
        output = tmp_path / "my-run"
        offline = {"time/step": 0.1, "time/update": 0.1}
        sft = run_job(output, SFT, [{"step": n, "loss/sft": 1 / n, **offline} for n in range(1, 26)])
        finish(output, sft, loss=0.4)
        rm = run_job(output, RM, [{"step": n, "accuracy/pairs": 1 - 1 / n, **offline} for n in range(1, 26)])
        finish(output, rm, pair_accuracy=0.9375)
        ppo = run_job(output, PPO, map(ppo_record, range(1, 26)))
        ppo.write_held_out(samples)
        rule = sum(row["rule_after"] for row in samples) / len(samples)
        scores = {"reward_before": 0.5, "reward_after": 1.5, "rule_before": 0.0, "rule_after": rule}
        finish(output, ppo, **scores, win_rate=0.875, win_rate_null=0.47)
        write_attempt(output / "helpful-ppo", python="3.11.9", packages={"torch": "2.99.0"})
        return output

    return make
