"""Programs with the client of the package openai ask a real proxy; the engine behind it writes what a script says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.telemetry import EPISODE, MODEL_CALL, TOOL
from rlhf_trainer.workers.episodes import EndedEpisode
from rlhf_trainer.workers.samples import sample_of, turns_of
from tests.each import each_case
from tests.trainer.agents.stage import PROMPT, Troupe, answers_on_branches
from tests.trainer.environments.scripted import END

LEARNED = {
    "plain": (2, 1, 1.0),
    "awaited": (1, 1, 0.5),
    "retried": (1, 1, 1.0),
    "edited": (3, 2, 1.0),
    "streamed": (2, 2, None),
    "text": (2, 1, 1.0),
    "tools": (2, 1, 1.0),
    "stopped": (1, 1, 1.0),
    "samples": (1, 1, 0.0),
    "parallel": (6, 5, 2.0),
    "posts": (1, 1, 3.0),
    "too_often": (6, 6, 0.0),
    "at_most": (6, 6, 6.0),
}
"""Behaviour of a program -> (calls that are answered, branches, reward)."""


@pytest.fixture(scope="module")
def troupe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    made = Troupe(tmp_path_factory.mktemp("agents"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def episodes(troupe: Troupe) -> dict[str, EndedEpisode]:
    """Of each behaviour, all of which were played beside each other, and one row of padding."""
    rows = [{"does": each, "patience": 1.0} for each in LEARNED]
    found = troupe.play(*rows, None)
    assert found[-1] == EndedEpisode(prompt=PROMPT)
    return dict(zip(LEARNED, found[:-1], strict=True))


@each_case("name", LEARNED)
def test_an_episode_has_the_programs_calls_and_reward(episodes: dict[str, EndedEpisode], name: str) -> None:
    calls, branches, reward = LEARNED[name]
    played = episodes[name]
    assert played.failure == ""
    assert (played.facts["calls"], played.facts["branches"]) == (calls, branches)
    assert reward is None or sum(played.rewards.values()) == reward
    assert played.response.finished is (name not in ("too_often", "at_most"))
    assert played.response.written[-1]


def test_every_id_is_what_the_engine_wrote(episodes: dict[str, EndedEpisode], troupe: Troupe) -> None:
    assert answers_on_branches(episodes.values(), troupe.engine.wrote) == len(troupe.engine.wrote)


def test_rows_of_a_batch_are_trees(episodes: dict[str, EndedEpisode], troupe: Troupe) -> None:
    batch, names = troupe.batch, list(LEARNED)
    for row, played in enumerate(episodes.values()):
        size, start = int(batch["attention_mask"][row].sum()), len(played.prompt)
        assert batch["parents"][row, :start].tolist() == list(range(-1, start - 1))
        assert batch["parents"][row, start:size].tolist() == list(played.response.parents)
        assert batch["turn_rewards"][row].nonzero()[:, 0].tolist() == (
            [size - 1] if sum(played.rewards.values()) else []
        )
        assert batch["response_mask"][row, start:size].tolist() == [float(each) for each in played.response.written]
    assert batch["played"].tolist() == [1.0] * batch.size
    assert batch["parents"].dtype == torch.int64
    parallel = names.index("parallel")
    assert len({*batch["parents"][parallel].tolist()}) < int(batch["attention_mask"][parallel].sum())


def test_what_is_scored_is_the_last_answer_on_its_branch(episodes: dict[str, EndedEpisode], troupe: Troupe) -> None:
    row = list(LEARNED).index("edited")
    sample = sample_of(troupe.batch, row, troupe.tokenizer)
    prompt, response = troupe.engine.wrote, episodes["edited"]
    last = next(
        each for each in prompt if tuple(each[1].tokens) == tuple(response.response.tokens[-len(each[1].tokens) :])
    )
    assert sample.prompt == troupe.tokenizer.decode(last[0], skip_special_tokens=True)
    assert "Be brief." not in sample.prompt
    assert sample.response == troupe.tokenizer.decode(last[1].tokens, skip_special_tokens=True)


def test_an_episode_is_kept_as_a_tree(episodes: dict[str, EndedEpisode], troupe: Troupe) -> None:
    turns = {name: turns_of(troupe.batch, row, troupe.tokenizer) for row, name in enumerate(LEARNED)}
    assert [each["after"] for each in turns["plain"]] == [-1, 0, 1]
    assert [each["written"] for each in turns["plain"]] == [True, False, True]
    assert turns["plain"][1]["text"] == "\n<user>sure?\n<assistant>"
    assert [each["after"] for each in turns["too_often"]] == [-1] * 6
    answers = [each for each in turns["edited"] if each["written"]]
    assert len(answers) == 3
    assert turns["posts"][-1]["reward"] == 3.0
    facts = episodes["plain"].facts
    assert facts["program_seconds"] > 0.0 < facts["model_seconds"]
    assert facts["waiting_seconds"] > 0.0


def test_counts_of_episodes_are_measured(episodes: dict[str, EndedEpisode], troupe: Troupe) -> None:
    report = troupe.report
    assert report.sums["episodes/failed"] == 0
    assert report.sums["episodes/refused"] == 2, "the last calls of too_often and at_most"
    assert report.sums["episodes/dropped"] >= 1, "the first call of retried"
    assert (report.sums["episodes/ignored"], report.sums["episodes/encoded_again"]) == (1, 0)
    total, count = report.means["episodes/turns"]
    assert (total, count) == (sum(calls for calls, *_ in LEARNED.values()), len(LEARNED))
    total, _ = report.means["episodes/masked_tokens"]
    assert total == sum(list(each.response.written).count(False) for each in episodes.values())
    (sentence,) = report.warnings.values()
    assert sentence == (
        "talk: spec.rollout.agent: calls asked for seed, temperature, but the job's sampling and template hold"
    )


def test_calls_and_tools_are_spans_of_their_episode(episodes: dict[str, EndedEpisode], troupe: Troupe) -> None:
    spans = {span.id: span for span in troupe.report.spans}
    whole = [span for span in spans.values() if span.phase == EPISODE]
    calls = Counter(span.parent for span in spans.values() if span.phase == MODEL_CALL)
    assert len(whole) == len(LEARNED)
    assert sum(calls.values()) >= sum(played.facts["calls"] for played in episodes.values()), "dropped ones, too"
    assert set(calls) == {span.id for span in whole}
    for span in (each for each in spans.values() if each.phase != EPISODE):
        outer = spans[span.parent]
        assert outer.start <= span.start <= span.end <= outer.end
    (tool,) = (span for span in spans.values() if span.phase == TOOL)
    assert (tool.name, calls[tool.parent]) == ("add", LEARNED["tools"][0])


def test_the_row_is_that_of_the_file_with_the_named_columns(tmp_path: Path) -> None:
    program = """
import json, sys
row = json.load(sys.stdin)
open(sys.argv[1], "w").write(row["prompt"] + row["extra"])
"""
    troupe = Troupe(tmp_path, command=["python3", "-c", program, str(tmp_path / "row")])
    with pytest.raises(UserCodeError, match=r"failed in all 2 .* the first: ended without an answer of the model"):
        troupe.play({"extra": "!"}, {"extra": "!"})
    troupe.close()
    assert (tmp_path / "row").read_text() == "as in the file!"


def test_a_command_posts_its_reward(tmp_path: Path) -> None:
    """A program without a package: curl would do."""
    program = """
import json, os, sys, urllib.request
def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
row = json.load(sys.stdin)
if row.get("fails"):
    raise OSError("no such game")
post("/chat/completions", {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "2+2?"}]})
post("/reward", {"reward": 0.25})
"""
    (tmp_path / "program.py").write_text(program)
    troupe = Troupe(tmp_path, command=["python3", str(tmp_path / "program.py")])
    well, failed = troupe.play({}, {"fails": 1})
    troupe.close()
    assert (sum(well.rewards.values()), well.failure, well.facts["calls"]) == (0.25, "", 1)
    assert failed.failure == (
        "run gave no result, as the command ended its process with exit code 1: OSError: no such game"
    )
    assert troupe.report.warnings["episodes/failed"].startswith("talk: spec.rollout.agent: python3 ")
    assert well.response.tokens[-1] == END


def test_names_of_ignored_parameters_are_bounded(troupe: Troupe) -> None:
    (episode,) = troupe.play({"does": "many_names"})
    names = [f"a{number:02}" for number in range(16)]
    assert (episode.failure, episode.facts["ignored"]) == ("", [*names, "others"])
    (sentence,) = troupe.report.warnings.values()
    assert f"asked for {', '.join(names)}, others, but" in sentence


def test_a_reward_of_the_manifest_is_not_added_to_by_a_post(tmp_path: Path) -> None:
    """Code of the model that the program runs may have its key."""
    troupe = Troupe(tmp_path, entrypoint="tests.trainer.agents.user_agents:run", reward={"entrypoint": "a.b:c"})
    posted, nothing = troupe.play({"does": "posts_or_not"}, {"does": "nothing"})
    troupe.close()
    assert [(sum(each.rewards.values()), each.failure) for each in (posted, nothing)] == [(403.0, ""), (0.0, "")]


def test_two_runs_of_one_job_sample_by_the_same_seeds(troupe: Troupe) -> None:
    seeds: list[Any] = []
    for _ in range(2):
        troupe.play({"does": "plain"}, {"does": "plain"})
        seeds.append(sorted((tuple(prompt), seed) for _, prompt, seed, _ in troupe.engine.asked))
    assert seeds[0] == seeds[1]
    assert len({seed for _, seed in seeds[0]}) == 4
