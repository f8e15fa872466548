"""`rlhf ui`: a list of runs with search and sort, a run's page as in its report, comparisons; by real requests."""

import asyncio
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp.test_utils import TestClient, TestServer
from typer.testing import CliRunner

from rlhf_api.exit_codes import ExitCode
from rlhf_trainer.commands.cli import app
from rlhf_trainer.commands.ui import application
from rlhf_trainer.report.runs import list_runs
from rlhf_trainer.run_folder.lock import only_run_in
from tests.each import each_case
from tests.trainer.report.conftest import PPO, SFT, Page, finish, ppo_record, report, run_job

NASTY = "<img src=x onerror=alert(1)>&'\" #?%"


class Answer(NamedTuple):
    status: int
    text: str
    headers: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """The runs of a list, in its order."""
        return [row[1].split("  ")[0].strip() for row in Page(self.text).cells if len(row) == 7][1:]


def ask(root: Path, *paths: str, method: str = "GET", **headers: str) -> list[Answer]:
    """What the server of a folder answers to requests, one after the other."""

    async def all_of_them() -> list[Answer]:
        found = []
        async with TestClient(TestServer(application(root))) as client:
            for path in paths:
                async with client.request(method, path, headers=headers, allow_redirects=False) as answer:
                    found.append(Answer(answer.status, await answer.text(), answer.headers.copy()))
        return found

    return asyncio.run(all_of_them())


def ask_one(root: Path, path: str, **options: Any) -> Answer:
    (found,) = ask(root, path, **options)
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs that have finished, go on, died, failed, and folders that are damaged, half-written, or none."""
    root = tmp_path_factory.mktemp("all") / "runs"
    for name, after in (("alpha", 1.5), ("sweep/beta", 2.5)):
        finish(root / name, run_job(root / name, SFT, [{"step": 1, "loss/sft": 0.25}]), loss=0.4)
        finish(root / name, run_job(root / name, PPO, map(ppo_record, (1, 2))), reward_before=0.5, reward_after=after)
    run_job(root / "dead", PPO, map(ppo_record, (1,)))
    failed = run_job(root / "failed", PPO, [])
    failed.fail(reason="Numerics", exit_code=ExitCode.NUMERICS, message="step 3: loss/policy is not finite")
    torn = run_job(root / "torn", PPO, map(ppo_record, (1, 2)))
    (torn.path / "status.json").write_text('{"phase": "Run')
    (root / "begun").mkdir()
    (root / "begun" / "summary.json").write_text("{}")
    run_job(root / "a" / "b" / "c" / "deep", SFT, [])
    (root / "link").symlink_to(root.parent)
    run_job(root / NASTY, SFT, [])
    with only_run_in(root / "live"):
        run_job(root / "live", PPO, map(ppo_record, range(1, 4)))
        yield root


@pytest.fixture(scope="module")
def listed(root: Path) -> Page:
    return Page(ask_one(root, "/").text)


@each_case(
    ("name", "cells"),
    [
        ("alpha", ["Succeeded", "helpful-ppo PPO", "2 of 25", "reward 1.2"]),
        ("live", ["Running", "helpful-ppo PPO", "3 of 25", "reward 1.3"]),
        ("dead", ["Died", "helpful-ppo PPO", "1 of 25", "reward 1.1"]),
        ("failed", ["Failed", "helpful-ppo", "", ""]),
        ("torn helpful-ppo/status.json cannot be read", ["Damaged", "helpful-ppo", "", ""]),
        ("begun no <job>/job.yaml yet, which `rlhf run` writes before a job's first step", ["", "", "", ""]),
        (NASTY, ["Died", "helpful-sft", "", ""]),
    ],
)
def test_a_run_is_a_row(listed: Page, name: str, cells: list[str]) -> None:
    assert listed.row("", name)[2:6] == cells


def test_a_link_is_not_followed(listed: Page, root: Path) -> None:
    assert listed.row("", f"link is a link to {root.parent}, which is not followed")
    assert "10 runs" in " ".join(listed.sections[""].split())


@each_case(
    ("query", "first"),
    [
        ("text=ppo+succ&order=run", ["alpha", "sweep/beta"]),
        ("text=PPO&order=run", ["alpha", "dead", "failed", "live", "sweep/beta", "torn"]),
        ("text=succ&order=-run", ["sweep/beta", "alpha"]),
        ("text=sweep&run=dead&run=nowhere", ["dead", "sweep/beta"]),
        ("order=-reward+or+loss", ["live"]),
        ("order=-step", ["live"]),
        ("order=nonsense&text=nowhere", []),
    ],
)
def test_rows_are_searched_and_sorted(root: Path, query: str, first: list[str]) -> None:
    names = ask_one(root, f"/?{query}").names
    assert [name.split(" helpful-ppo/")[0] for name in names][: len(first) or None] == first


def test_a_runs_page_is_its_report_and_knows_the_way_back(root: Path) -> None:
    assert report(root / "alpha").exit_code == 0
    written = (root / "alpha" / "report.html").read_text()
    page = ask_one(root, "/runs/alpha/report.html").text
    main = slice(written.index("<main>"), written.index("</main>"))
    assert written[main] == page[page.index("<main>") : page.index("</main>")]
    assert ('<a href="/">all runs</a>' in page, '<a href="/">all runs</a>' in written) == (True, False)
    assert "<script" not in written


def test_runs_are_compared_if_two_are_chosen(root: Path) -> None:
    both, one, gone = ask(
        root, "/compare.html?run=alpha&run=sweep/beta", "/compare.html?run=alpha", "/compare.html?run=a&run=b"
    )
    assert Page(both.text).row("reward_after")[1:3] == ["1.5", "2.5"]
    assert (one.status, gone.status) == (400, 404)
    assert "choose 2 to 10 runs, not 1" in one.text


def test_a_page_is_sent_again_when_a_file_has_changed(tmp_path: Path) -> None:
    folder = run_job(tmp_path / "one", PPO, map(ppo_record, (1, 2)))
    address = "/runs/one/report.html"
    (first,) = ask(tmp_path, address)
    (same,) = ask(tmp_path, address, **{"If-None-Match": first.headers["ETag"]})
    assert (same.status, same.text) == (304, "")
    folder.record(ppo_record(3), total_steps=25, stage="PPO")
    (later,) = ask(tmp_path, address, **{"If-None-Match": first.headers["ETag"]})
    assert later.status == 200
    assert Page(later.text).row("helpful-ppo", "PPO")[3] == "3 of 25"


def test_rollouts_have_their_page(root: Path) -> None:
    page = ask_one(root, "/runs/sweep/beta/rollouts.html")
    assert page.status == 200
    assert '<a href="/">all runs</a><a href="report.html">report</a>' in page.text


@each_case("name", ["torn", "begun", "failed", NASTY])
def test_a_damaged_folder_has_a_page_or_a_sentence(root: Path, name: str) -> None:
    from urllib.parse import quote

    page = ask_one(root, f"/runs/{quote(name)}/report.html")
    assert page.status == (409 if name == "begun" else 200)
    assert "cannot be read" in page.text if name == "torn" else "Traceback" not in page.text
    assert "<img src=x" not in page.text


@each_case(
    ("path", "status"),
    [
        ("/runs/nowhere/report.html", 404),
        ("/runs/alpha/metrics.html", 404),
        ("/runs/alpha/helpful-ppo/report.html", 404),
        ("/runs/..%2f..%2f..%2fetc/report.html", 404),
        ("/runs/link/runs/alpha/report.html", 404),
        ("/runs/alpha/summary.json", 404),
        ("/static/../../etc/passwd", 404),
    ],
)
def test_nothing_else_is_served(root: Path, path: str, status: int) -> None:
    assert ask_one(root, path).status == status


def test_a_file_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("my secret\n")
    folder = run_job(tmp_path / "runs" / "one", PPO, [])
    (folder.path / "events.log").unlink()
    (folder.path / "events.log").symlink_to(tmp_path / "secret")
    page = ask_one(tmp_path / "runs", "/runs/one/report.html")
    assert (page.status, page.text) == (409, f"{folder.path / 'events.log'}: is a link, which is not followed")


def test_names_may_have_any_bytes(tmp_path: Path) -> None:
    folder = run_job(tmp_path / "two\nlines", SFT, [])
    assert ask_one(tmp_path, "/runs/two%0Alines/report.html").status == 200
    (folder.path / os.fsdecode(b"\xff")).symlink_to(tmp_path)
    (folder.path / os.fsdecode(b"\xfe")).symlink_to(tmp_path / "gone")
    assert ask_one(tmp_path, "/runs/two%0Alines/report.html").status == 409


@each_case("host", ["evil.example", "127.0.0.1.evil.example:8600", "", "[::1]:8600"])
def test_another_host_is_refused(root: Path, host: str) -> None:
    assert ask_one(root, "/", Host=host).status == 403


@each_case("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_only_get_is_served(root: Path, method: str) -> None:
    assert ask_one(root, "/", method=method).status == 405


def test_every_answer_has_a_strict_policy(root: Path) -> None:
    for answer in ask(root, "/?text=%3Cscript%3E&run=%ED%A0%80", "/runs/alpha/report.html", "/nowhere"):
        policy = dict(part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; "))
        assert (policy["default-src"], policy["connect-src"], policy["frame-ancestors"]) == (
            "'none'",
            "'self'",
            "'none'",
        )
        assert "unsafe" not in policy["script-src"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert not [tag for tag, names in Page(answer.text).elements for name in names if name.startswith("on")]
        assert "<script>" not in answer.text.replace("<script>&#34;use strict", "").replace('<script>"use strict', "")


def test_only_small_files_are_read_for_the_list(tmp_path: Path) -> None:
    folder = run_job(tmp_path / "one", PPO, map(ppo_record, (1,))).path
    for name in ("metrics.jsonl", "rollouts.jsonl", "samples.jsonl", "events.log", "trace.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)  # whoever opens it waits for ever
    (row,) = list_runs(tmp_path).values()
    assert row.progress
    assert (row.progress.step, row.has_page) == (1, True)


def test_a_run_folder_itself_is_a_list_of_one(root: Path) -> None:
    page, run = ask(root / "sweep" / "beta", "/", "/runs/beta/report.html")
    assert (page.names, run.status) == (["beta"], 200)


def test_an_empty_folder_says_what_fills_it(tmp_path: Path) -> None:
    assert "There is no run below" in ask_one(tmp_path, "/").text


def ui(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["ui", *map(str, words)])
    return done.exit_code, " ".join(done.output.split())


def test_a_wrong_folder_or_port_is_one_sentence(root: Path) -> None:
    assert ui(root / "nowhere") == (2, f"error: {root}/nowhere: is no folder; {HINT}")
    job = root / "alpha" / "helpful-ppo"
    assert ui(job) == (2, f"error: {job}: is the folder of a job; name its run folder, {root / 'alpha'}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = f"error: --port: 127.0.0.1:{port}: Address already in use; name another port"
        assert ui(root, "--port", port) == (2, sentence)


HINT = "name one with run folders, as `rlhf run` writes them"


def test_a_status_of_another_kind_is_damage(tmp_path: Path) -> None:
    for number, text in enumerate(("[]", "3", "", '{"phase": "Odd"}', json.dumps({"progress": {"step": "x"}}))):
        (tmp_path / str(number) / "job").mkdir(parents=True)
        (tmp_path / str(number) / "job" / "status.json").write_text(text)
        (tmp_path / str(number) / "summary.json").write_text(text)
    assert {row.phase for row in list_runs(tmp_path).values()} == {"Damaged"}
