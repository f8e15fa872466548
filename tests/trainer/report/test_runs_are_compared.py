"""`rlhf report A B`: jobs of one name on one page, their figures, their curves, and what differs in the manifests."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.exit_codes import ExitCode
from rlhf_api.files import load
from tests.trainer.report.conftest import PPO, RM, ROOT, SFT, Page, finish, ppo_record, report, run_job, write_attempt

(FASTER,) = [
    job
    for job in load(ROOT / "examples" / "01-helpful-ppo.yaml", ["helpful-ppo:models.actor.optimizer.learningRate=1e-4"])
    if job.name == PPO.name
]


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of PPO, one of them with another learning rate and SFT before."""
    finish(tmp_path / "a", run_job(tmp_path / "a", PPO, map(ppo_record, range(1, 26))), reward_after=1.5, win_rate=0.5)
    run_job(tmp_path / "b", SFT, [])
    steps = [{**ppo_record(step), "reward/mean": 2.0, "entropy": step / 3} for step in range(1, 11)]
    finish(tmp_path / "b", run_job(tmp_path / "b", FASTER, steps), reward_after=1.25)
    for name, version in (("a", "2.1"), ("b", "2.2")):
        write_attempt(tmp_path / name / "helpful-ppo", python="3.11.9", packages={"torch": version})
    return tmp_path / "a", tmp_path / "b"


def compared(*arguments: object) -> tuple[Path, str, Page]:
    done = report(*arguments)
    assert done.exit_code == 0, done.output
    path = Path(done.stdout.strip())
    return path, path.read_text(), Page(path.read_text())


def test_figures_curves_and_differences_stand_on_one_page(runs: tuple[Path, Path]) -> None:
    path, html, page = compared(*runs)
    assert path == runs[0] / "compare.html"
    assert page.row("status")[1:] == ["Succeeded", "Succeeded", ""]
    assert page.row("steps")[1:3] == ["25", "10"]
    assert page.row("reward_after")[1:] == ["1.5", "1.25", "\N{MINUS SIGN}0.25"]
    assert page.row("win_rate")[1:] == ["0.5", "", ""]
    assert page.row("spec.models.actor.optimizer.learningRate")[2] == "0.0001"
    assert [row for row in page.cells if row and row[0].startswith(("spec.", "metadata."))] == [
        page.row("spec.models.actor.optimizer.learningRate")
    ]
    assert page.row("packages.torch")[1:] == ["2.1", "2.2"]
    assert "helpful-sft is only in b." in page.sections[""]
    plot = html[html.index("<b>reward/mean</b>") :]
    assert "last step: " in plot[: plot.index("</figcaption>")], "the table has held-out values"
    assert all(f"stroke: var(--c{colour})" in plot[: plot.index("</figure>")] for colour in (0, 1))
    entropy = html[html.index("<b>entropy</b>") :]
    assert "stroke: var(--c0)" not in entropy[: entropy.index("</figure>")], "only the second measured it"


def test_other_content_at_the_same_address_is_a_difference(runs: tuple[Path, Path]) -> None:
    for run, digit in zip(runs, "01", strict=True):
        file = run / PPO.name / "status.json"
        status = json.loads(file.read_text())
        read = {"name": "data.train", "uri": "file:///rows.jsonl", "digest": f"sha256:{64 * digit}"}
        file.write_text(json.dumps({**status, "inputs": [read]}))
    _, _, page = compared(*runs)
    assert page.row("inputs.data.train")[1:3] == [f"sha256:{64 * digit}" for digit in "01"]


def test_a_file_that_is_damaged_or_missing_is_no_difference(runs: tuple[Path, Path]) -> None:
    (runs[0] / "helpful-ppo" / "run.json").unlink()
    (runs[1] / "helpful-ppo" / "job.yaml").write_text("spec: [")
    _, html, page = compared(*runs)
    assert "b: job.yaml cannot be read" in page.sections["helpful-ppo"]
    assert "unset" not in html
    assert "environment" not in page.sections


def test_a_metric_constant_in_each_run_but_unequal_is_drawn(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        run_job(tmp_path / name, PPO, [{"step": step, "entropy": value, "padding/waste": 0.5} for step in (1, 2)])
    _, html, _ = compared(tmp_path / "a", tmp_path / "b")
    assert "<b>entropy</b>" in html
    assert "padding/waste" not in html
    assert "the manifests, with their defaults, are the same" in html


def test_three_runs_of_one_name_are_told_apart_by_path(tmp_path: Path) -> None:
    folders = [tmp_path / name / "run" for name in ("x", "y", "z")]
    for folder in folders:
        run_job(folder, PPO, map(ppo_record, (1, 2)))
    _, _, page = compared(*folders)
    assert page.row("At the end, held out")[1:] == list(map(str, folders))


def test_runs_of_other_jobs_have_nothing_to_compare(tmp_path: Path) -> None:
    run_job(tmp_path / "a", PPO, [])
    run_job(tmp_path / "b", RM, [])
    assert "No job of one run has the name of a job of another" in compared(tmp_path / "a", tmp_path / "b")[1]


def test_the_page_escapes_texts_and_runs_nothing(tmp_path: Path) -> None:
    for name, text in (("a", "<script>alert(1)</script>"), ("b", "")):
        run_job(tmp_path / name, PPO, [ppo_record(1)])
        write_attempt(tmp_path / name / "helpful-ppo", host=text)
    _, html, page = compared(tmp_path / "a", tmp_path / "b")
    assert not {tag for tag, _ in page.elements} & {"script", "link", "img"}
    assert "script-src" not in html
    assert page.row("host")[1] == "<script>alert(1)</script>"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["a", "nowhere"], ExitCode.SPEC, "error: nowhere: is no run folder: there is no such folder"),
        (["a"] * 11, ExitCode.SPEC, "error: 11 runs are too many to compare: at most 10"),
        (["b", "a"], ExitCode.ENVIRONMENT, "error: b/compare.html: Is a directory"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[Any], code: ExitCode, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        run_job(tmp_path / name, PPO, [])
    (tmp_path / "b" / "compare.html").mkdir()
    monkeypatch.chdir(tmp_path)
    done = report(*arguments)
    assert (done.exit_code, done.stderr) == (code, f"{sentence}\n")
