"""`rollouts.html`: what a run learned from, as text, and filtered by a script of ours alone."""

import base64
import hashlib
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.report.conftest import PPO, Page, page_of, ppo_record, run_job

NASTY = '</script><script>alert(1)</script><!-- <img src=x onerror=y> & "quoted" 日本語 \u2028 \ud800'
SCRIPT = Path(__file__).parents[3] / "trainer_image" / "rlhf_trainer" / "report" / "templates" / "rollouts.js"
Write = Callable[[Iterable[dict[str, Any]]], Path]


def rollout(step: int, row: int, **changes: Any) -> dict[str, Any]:
    """A line of rollouts.jsonl."""
    return {
        "step": step,
        "row": row,
        "prompt": f"question {row}",
        "response": "answer",
        "reward": row / 2,
        "reward_parts": {"right": 1.0, "brief": row / 4},
        "advantage": -row / 2,
        "columns": {"answer": "42"},
        "finished": True,
        "prompt_tokens": 3,
        "response_tokens": 5,
        "policy_version": step - 1,
        **changes,
    }


@pytest.fixture
def run(tmp_path: Path) -> Write:
    """Makes a run of PPO that kept these rollouts."""

    def make(rows: Iterable[dict[str, Any]]) -> Path:
        folder = run_job(tmp_path, PPO, map(ppo_record, (1, 2, 3)))
        (folder.path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path

    return make


def rollouts_page(folder: Path) -> tuple[Page, list[dict[str, Any]]]:
    """The page, and the rows in it."""
    page = Page((folder / "rollouts.html").read_text(encoding="utf-8"))
    return page, json.loads(page.scripts[0])["rows"]


def test_a_row_has_its_texts_reward_parts_and_advantage(run: Write) -> None:
    folder = run([rollout(1, 0), rollout(2, 1), rollout(2, 1, reward=9.0, cost=0.5, finished=False)])
    report = page_of(folder)
    _, rows = rollouts_page(folder)
    assert [(row["step"], row["reward"], row["cost"], row["finished"]) for row in rows] == [
        (1, 0.0, None, True),
        (2, 9.0, 0.5, False),
    ], "of a step that was run twice the last"
    assert rows[0]["parts"] == {"right": 1.0, "brief": 0.0}
    assert [rows[1][name] for name in ("advantage", "prompt_tokens", "response_tokens", "policy_version")] == [
        *(-0.5, 3, 5, 1)
    ]
    assert (rows[0]["job"], rows[0]["columns"]) == ("helpful-ppo", '{"answer": "42"}')
    assert "2 of the 2 responses that rollout.keep kept, of 2 steps" in report.sections["helpful-ppo"]
    links = [attributes.get("href") for tag, attributes in report.elements if tag == "a"]
    assert {"rollouts.html", "rollouts.html#helpful-ppo"} <= set(links)


def test_an_episode_is_a_conversation_with_the_models_part(run: Write) -> None:
    turns = [
        {"text": "<tool_call>2+2", "written": True, "reward": 0.0},
        {"text": NASTY, "written": False, "reward": 0.0},
        {"text": "4", "written": True, "reward": 1.5},
    ]
    folder = run([rollout(1, 0, turns=turns), rollout(1, 1), rollout(1, 2, turns=[3, {}])])
    page_of(folder)
    page, rows = rollouts_page(folder)
    assert [row["turns"] for row in rows] == [turns, [], [{"text": "None", "written": False, "reward": None}]]
    assert (
        "Indented is what an environment, a tool or a program said, from which nothing is learned." in page.sections[""]
    )
    page_of(run([rollout(1, 1)]))
    assert "Indented" not in rollouts_page(folder)[0].sections[""]


def test_an_agents_episode_is_a_tree_with_its_counts(run: Write) -> None:
    turns = [
        {"text": "4", "written": True, "reward": 0.0, "after": -1},
        {"text": "sure?", "written": False, "reward": 0.0, "after": 0},
        {"text": "5", "written": True, "reward": 1.0, "after": None},
    ]
    episode = {"calls": 2, "branches": 2, "ignored": ["seed"], "program_seconds": 0.25}
    folder = run([rollout(1, 0, turns=turns, episode=episode), rollout(1, 1, episode="none")])
    page_of(folder)
    _, rows = rollouts_page(folder)
    assert rows[0]["turns"] == turns
    assert rows[0]["episode"] == {"calls": 2.0, "branches": 2.0, "ignored": None, "program_seconds": 0.25}
    assert rows[1]["episode"] == {}


@pytest.mark.skipif(not shutil.which("node"), reason="runs the page's script by node")
def test_a_branch_names_the_part_that_it_goes_on_from() -> None:
    text = SCRIPT.read_text()
    function = text[text.index("function turn") : text.index("\n}\n", text.index("function turn")) + 2]
    turns = [(-1, 0), (0, 1), (0, 2), (None, 3), (-1, 4), (3, 5)]
    asked = [
        ({"text": "t", "written": True, "reward": 2.0 * (place == 4), "after": after}, place) for after, place in turns
    ]
    program = f"""const element = (tag, className, text, ...children) => text + children.join("");
        {function}
        console.log(JSON.stringify({json.dumps(asked)}.map(([one, place]) => turn(one, place))));"""
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [
        "t",
        "t",
        "t · part 3, a branch from part 1",
        "t · part 4, a branch from another beginning",
        "t · part 5, a branch from the prompt · reward 2",
        "t · part 6, a branch from part 4",
    ]


def test_a_job_without_rollouts_has_no_such_page(run: Write) -> None:
    folder = run([rollout(1, 0)])
    page_of(folder)
    (folder / "helpful-ppo" / "rollouts.jsonl").unlink()
    report = page_of(folder)
    assert not (folder / "rollouts.html").exists()
    assert "rollouts.html" not in json.dumps(report.elements)
    assert "that rollout.keep kept" not in report.sections["helpful-ppo"]


def test_texts_end_no_script_and_no_other_script_may_run(run: Write) -> None:
    folder = run([rollout(1, 0, prompt=NASTY, response=NASTY, columns={"answer": NASTY}, reward_parts={NASTY: 1.0})])
    page_of(folder)
    page, (row,) = rollouts_page(folder)
    assert row["response"] == row["prompt"] == NASTY
    assert list(row["parts"]) == [NASTY]
    data, ours = page.scripts
    assert "<" not in data
    assert ours == SCRIPT.read_text()
    assert not {tag for tag, _ in page.elements} & {"link", "img", "iframe", "object"}
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    (policy,) = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    digest = base64.b64encode(hashlib.sha256(ours.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert "innerHTML" not in ours


def test_torn_lines_are_counted_and_bad_numbers_left_out(run: Write) -> None:
    folder = run(
        [rollout(1, 0, reward=float("nan"), reward_parts={"right": float("inf")}), {**rollout(1, 1), "step": "one"}]
    )
    with (folder / "helpful-ppo" / "rollouts.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "row": 3, "pro\xff')
    report = page_of(folder)
    _, (row,) = rollouts_page(folder)
    assert (row["reward"], row["parts"]) == (None, {"right": None})
    assert "rollouts.jsonl: 2 of 3 lines cannot be read" in report.sections["helpful-ppo"]


def test_of_many_rows_the_page_has_the_first_of_steps(run: Write) -> None:
    folder = run(rollout(step, row, response="words " * 1000) for step in range(1, 61) for row in range(50))
    page_of(folder)
    page, rows = rollouts_page(folder)
    assert set(Counter(row["step"] for row in rows).values()) == {40}
    assert {row["step"] for row in rows} == set(range(1, 61, 2))
    assert [row["row"] for row in rows[:40]] == list(range(40))
    assert "1,200 of 3,000 kept responses of 60 steps, the first of steps spread over the run" in page.sections[""]
    assert (folder / "rollouts.html").stat().st_size < 3_600_000


ROWS = [
    {"job": "a", "step": 1, "row": 0, "reward": 0.5, "advantage": None, "response_tokens": 9, "finished": False},
    {"job": "a", "step": 2, "row": 0, "reward": -1, "advantage": 2.0, "response_tokens": 5, "finished": True},
    {"job": "a", "step": 3, "row": 0, "reward": None, "advantage": -3.0, "response_tokens": 7, "finished": True},
    {"job": "b", "step": 3, "row": 1, "reward": 2, "advantage": 0.0, "response_tokens": 7, "finished": True},
]
EVERYTHING = dict.fromkeys(("job", "firstStep", "lastStep", "leastReward", "mostReward", "finished", "text"), "")
FILTERS = [
    ({}, [0, 1, 2, 3]),
    ({"firstStep": "2", "lastStep": "2"}, [1]),
    ({"leastReward": "-1", "mostReward": "0.5"}, [0, 1]),
    ({"mostReward": "5"}, [0, 1, 3]),
    ({"finished": "no"}, [0]),
    ({"finished": "yes", "job": "b"}, [3]),
    ({"text": "Text 2"}, [2]),
    ({"text": "nowhere"}, []),
    ({"order": "reward 1"}, [1, 0, 3, 2]),
    ({"order": "reward -1"}, [3, 0, 1, 2]),
    ({"order": "response_tokens -1"}, [0, 2, 3, 1]),
    ({"order": "advantage -1"}, [1, 3, 2, 0]),
]


@pytest.mark.skipif(not shutil.which("node"), reason="runs the page's script by node")
def test_filters_choose_and_order_rows() -> None:
    rows = [{**row, "prompt": f"a text {place}", "response": "", "columns": ""} for place, row in enumerate(ROWS)]
    wanted = [{**EVERYTHING, "order": "step 1", **changes} for changes, _ in FILTERS]
    text = SCRIPT.read_text()
    function = text[text.index("function chosen") : text.index("\n}\n") + 2]
    program = f"""{function}
        const rows = {json.dumps(rows)};
        const found = {json.dumps(wanted)}.map((one) => chosen(rows, one).map((row) => rows.indexOf(row)));
        console.log(JSON.stringify(found));"""
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [places for _, places in FILTERS]


def test_every_filter_that_the_script_reads_is_in_the_form(run: Write) -> None:
    folder = run([rollout(1, 0)])
    page_of(folder)
    page, _ = rollouts_page(folder)
    names = {attributes["name"] for tag, attributes in page.elements if tag in ("input", "select")}
    assert names == {*EVERYTHING, "order"}
    assert all(f"wanted.{name}" in SCRIPT.read_text() for name in names)


def test_numbers_that_no_browser_can_show_are_left_out(run: Write) -> None:
    folder = run([rollout(1, 0, reward=10**400, reward_parts={"right": True, "brief": 10**400})])
    page_of(folder)
    _, rows = rollouts_page(folder)
    assert (rows[0]["reward"], rows[0]["parts"]) == (None, {"right": 1.0, "brief": None})
    assert not isinstance(rows[0]["parts"]["right"], bool), "the script asks for its digits"
