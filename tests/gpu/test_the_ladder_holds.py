"""Each step holds on a GPU where there is one, and in rehearsal; the ladder goes on, falls back and sums up."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import bare, ladder
from tests.gpu.carry import prepare
from tests.gpu.ladder import STEPS, Ladder, Step, result_of
from tests.gpu.summary import summary_of
from tests.repo.tree import ROOT

STAND_IN = """
import json, sys
from pathlib import Path
calls = Path({calls!r})
name = " ".join([Path(__file__).stem, *["eager"] * ("--eager" in sys.argv)])
calls.write_text(calls.read_text() + name + "\\n")
failed = {{"start": "no graphs"}} if {broken!r} and "--eager" not in sys.argv else {{}}
figures = {{"start": {{}}}} if failed else {{"start": {{}}, "later": {{}}}}
print(json.dumps({{"ok": not failed, "failed": failed, "skipped": {{}}, "figures": figures}}))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("letter", STEPS)
def test_a_step_holds_on_a_gpu(letter: str, tmp_path: Path) -> None:
    Ladder(tmp_path, rehearse=False).climb([letter], seconds=900)
    for line in Ladder(tmp_path, rehearse=False).lines().values():
        assert line["ok"], line["failed"]


@pytest.mark.slow
@pytest.mark.parametrize("letter", STEPS)
def test_a_step_holds_in_rehearsal(letter: str, tmp_path: Path) -> None:
    Ladder(tmp_path, rehearse=True).climb([letter], seconds=1700)
    line = Ladder(tmp_path, rehearse=True).lines()[letter]
    assert line["ok"], line["failed"]
    assert line["device"] == "cpu"
    assert line["figures"]


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.skipif(bare.python_of_the_machine() is None, reason="there is no Python 3.12")
def test_the_carried_parts_hold_in_a_bare_environment(tmp_path: Path) -> None:
    prepare()
    lines = bare.rehearse(tmp_path).lines()
    assert list(lines) == list(STEPS)
    assert {letter: line["failed"] for letter, line in lines.items() if not line["ok"]} == {}
    assert lines["F"]["figures"]["jobs"]["helpful-sft"]["steps"] == 2


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let steps be stand-ins that note their calls; returns a function that reads these."""
    path = tmp_path / "calls"
    path.write_text("")
    for module in ("plain", "mode", "first", "second"):
        (tmp_path / f"{module}.py").write_text(STAND_IN.format(calls=str(path), broken=module != "plain"))
    monkeypatch.setattr(ladder, "ROOT", tmp_path)
    monkeypatch.setattr(ladder, "PACKAGE", "")
    steps = {
        "A": Step("plain", 60),
        "B": Step("mode", 60, "x", has_engine=True),
        "C": Step("first", 60, has_engine=True),
        "D": Step("second", 60, has_engine=True),
    }
    monkeypatch.setattr(ladder, "STEPS", steps)
    return lambda: path.read_text().splitlines()


def test_an_engine_without_graphs_is_tried_at_once(calls: Any, tmp_path: Path) -> None:
    Ladder(tmp_path, rehearse=True).climb("ABCD", seconds=600)
    assert calls() == ["plain", "mode", "mode eager", "first", "first eager", "second eager"]
    lines = Ladder(tmp_path, rehearse=True).lines()
    assert lines["C"]["ok"]
    assert lines["C"]["fell_back"] == "no graphs"


def test_a_repeated_call_goes_on_where_the_last_ended(calls: Any, tmp_path: Path) -> None:
    Ladder(tmp_path, rehearse=True).climb("A", seconds=600)
    Ladder(tmp_path, rehearse=True).climb("AC", seconds=600)
    assert calls() == ["plain", "first", "first eager"]


def test_no_step_begins_without_time_for_it(calls: Any, tmp_path: Path) -> None:
    assert Ladder(tmp_path, rehearse=True).climb("AB", seconds=ladder.LEAST_SECONDS - 1)
    assert calls() == []
    assert "without a result: A plain, B mode x" in (tmp_path / "summary.txt").read_text()


def test_results_come_to_the_folder_that_is_sent_back(
    calls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setenv("OUT", str(out))
    Ladder(tmp_path, rehearse=True).climb("A", seconds=600)
    assert calls() == ["plain"]
    assert sorted(path.name for path in out.iterdir()) == ["logs.txt", "results.jsonl", "summary.txt"]


def test_a_killed_step_keeps_its_finished_parts() -> None:
    printed = ['{"part": "a", "figures": {"x": 1}, "failed": null}', "a library's line", '{"part": "b", "fig']
    line = result_of("\n".join(printed), -9)
    assert line["figures"] == {"a": {"x": 1}}
    assert line["failed"] == {"process": "it ended with exit code -9 and without its last line"}


def test_the_summary_says_by_how_much_a_figure_differs(tmp_path: Path) -> None:
    mapped = {"update_seconds": 1.04, "on a GPU that is unknown": None}
    plain = {"case": "x", "update_seconds": 1.3, "mfu": 0.25, "gb": {"actor update": 11.0}, "mapper": mapped}
    lines = {"B": {"ok": True, "failed": {"fused": "an error"}, "skipped": {}, "figures": {"plain": plain}}}
    counted = {"x": {"phases": {"actor update": {"peak": 10.0}}}}
    (tmp_path / "counted-x.json").write_text(json.dumps(counted))
    said = summary_of(lines, {letter: step.name for letter, step in STEPS.items()}, tmp_path).splitlines()
    assert [(" ".join(line.split()[3:5]), line.split("  ")[-1]) for line in said[1:5]] == [
        ("plain update_seconds", "+100% (measured on an H100)"),
        ("plain mfu", "none (measured on an H100)"),
        ("plain gb", "+10% (counted)"),
        ("plain update_seconds", "+25% (mapper)"),
    ]
    assert "B update 1.5b: fused FAILED: an error" in said
    assert "A facts" in said[-1]


def test_the_page_says_what_each_step_shows() -> None:
    page = (ROOT / "docs" / "what-ran-on-a-gpu.md").read_text().splitlines()
    rows = [line.split("|")[1].strip() for line in page if line.startswith("| ")]
    assert [row for row in rows if row[1:2] == " "] == [f"{letter} {step.name}" for letter, step in STEPS.items()]


def run(*options: str) -> list[dict[str, Any]]:
    """The lines of a rung that takes a minute."""
    program = """
import time
from tests.gpu.rung import main

def measure(rung):
    with rung.part("short") as found:
        found["x"] = 1
    with rung.part("long"):
        time.sleep(60)

main(measure)
"""
    command = [sys.executable, "-c", program, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == int(not lines[-1]["ok"])
    return lines


@pytest.mark.slow
def test_a_rung_whose_time_is_up_says_what_it_has() -> None:
    short, line = run("--rehearse", "--seconds", "1")
    assert short["figures"]["x"] == 1
    assert line["failed"] == {"time": "did not end in 1 s"}
    assert line["figures"]["short"]["x"] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_rung_without_a_gpu_says_so() -> None:
    assert "no CUDA device" in run()[-1]["failed"]["start"]
