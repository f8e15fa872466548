"""What the model wrote stays as it was sampled, what the environment says comes between, and no episode waits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_api.job import Job
from rlhf_trainer.data.turns import TurnEncoder
from rlhf_trainer.environments.environments import MAX_EPISODES
from rlhf_trainer.environments.of_job import environments_of
from rlhf_trainer.errors import EnvironmentProblem, UserCodeError
from rlhf_trainer.rewards.sandboxes import ADDRESS, Sandboxes
from rlhf_trainer.rewards.supervision import AnswerFailure, Kind
from rlhf_trainer.workers.episodes import EndedEpisode, require_some
from tests.api.cases import made
from tests.each import each_case
from tests.trainer.environments.scripted import END, LOG_PROB, ScriptedEngine, play_episodes
from tests.trainer.tiny import EXAMPLE_MODEL

PROMPT = [10, 11, 12]
LIMITS = (8, 64, 3)
"""Most tokens of a prompt and of an episode, and most turns."""


class Immediate:
    """Answers at once, and notes what it was asked."""

    def __init__(self, *said: Any) -> None:
        """said: to the reset and to each step of every episode."""
        self.said, self.most = said, MAX_EPISODES
        self.asked: list[tuple[int, str, Any]] = []
        self.ended: list[int] = []
        self.seeds: list[int] = []
        self._ready: list[tuple[int, Any]] = []
        self._turns: dict[int, int] = {}

    def begin(self, number: int, seed: int) -> None:
        self.seeds.append(seed)
        self._turns[number] = 0

    def ask(self, number: int, method: str, given: Any) -> None:
        self.asked.append((number, method, given))
        self._ready.append((number, self.said[self._turns[number]]))
        self._turns[number] += 1

    def answers(self, *, seconds: float) -> list[tuple[int, Any]]:
        found, self._ready = self._ready, []
        assert found or not seconds, "waits for ever"
        return found

    def end(self, number: int) -> str:
        self.ended.append(number)
        return ""

    def ready(self) -> None:
        pass


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(EXAMPLE_MODEL))


def played(
    tokenizer: PreTrainedTokenizerBase,
    environment: Any,
    script: Any,
    *,
    limits: tuple[int, int, int] = LIMITS,
    rows: Sequence[bool] = (True,),
) -> tuple[list[EndedEpisode], ScriptedEngine]:
    """The episodes of rows, which are padding where False; the seed of a call is 100 x row + turn."""

    class Engine(ScriptedEngine):
        pass

    Engine.script = staticmethod(script)
    engine, ended = Engine(), list[int]()
    prompts = [list(PROMPT) for _ in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf_trainer.workers.episodes.response_seed", lambda _, __, row, turn: 100 * row + turn)
        episodes = play_episodes(
            *(tokenizer, engine, environment, prompts),
            limits=limits,
            played=rows,
            ended=lambda row, *_: ended.append(row),
        )
    assert sorted(ended) == list(range(len(rows))), "each is told once"
    return episodes, engine


def test_ids_are_those_that_were_sampled(tokenizer: PreTrainedTokenizerBase) -> None:
    """The ids 300 and 301 are not what the tokenizer would make of their text."""
    sampled = next(
        [first, second]
        for first in range(3, 300)
        for second in range(3, 300)
        if (ids := tokenizer(tokenizer.decode([first, second]), add_special_tokens=False)["input_ids"])
        and ids != [first, second]
        and tokenizer.decode([first, second]).isascii()
    )
    environment = Immediate(None, ("more", 0.5, False), (None, 2.0, True))
    (episode,), engine = played(tokenizer, environment, lambda prompt, seed: [*sampled, END])
    more = tokenizer("more", add_special_tokens=False)["input_ids"]
    response = episode.response
    assert response.tokens == [*sampled, END, *more, *sampled, END]
    assert response.written == [True] * 3 + [False] * len(more) + [True] * 3
    assert response.log_probs == [LOG_PROB] * 3 + [0.0] * len(more) + [LOG_PROB] * 3
    assert episode.rewards == {2: 0.5, 5 + len(more): 2.0}
    assert (response.finished, episode.facts["calls"], episode.failure) == (True, 2, "")
    assert engine.asked == [(0, PROMPT, 0, 64), (0, [*PROMPT, *sampled, END, *more], 1, 61 - len(more))]
    text = tokenizer.decode(sampled)
    row = {"prompt": tokenizer.decode(PROMPT), "number": 0}
    assert environment.asked == [(0, "reset", row), (0, "step", text), (0, "step", text)]
    assert environment.ended == [0]


def test_an_episode_goes_on_while_another_environment_thinks(tokenizer: PreTrainedTokenizerBase) -> None:
    """The environment of episode 0 answers its first step only when all others have ended."""

    class Slow(Immediate):
        def answers(self, *, seconds: float) -> list[tuple[int, Any]]:
            others = sorted(set(self.ended)) == [1, 2]
            now = [each for each in self._ready if each[0] != 0 or others or self._turns[0] == 1]
            self._ready = [each for each in self._ready if each not in now]
            assert now or not seconds, "waits for an episode that waits for this one"
            return now

    environment = Slow(None, ("a", 0.0, False), ("b", 0.0, False), (None, 1.0, True))
    episodes, _ = played(tokenizer, environment, lambda prompt, seed: [5, END], rows=[True] * 3)
    assert [(each.facts["calls"], each.response.finished) for each in episodes] == [(3, True)] * 3
    assert environment.ended[-1] == 0


def test_a_request_is_sent_while_others_are_written(tokenizer: PreTrainedTokenizerBase) -> None:
    """Episode 1 writes one long answer, in which episode 0 has three turns."""
    answers = [None, ("a", 0.0, False), ("b", 0.0, False), (None, 1.0, True)]
    order: list[int] = []

    class Noting(Immediate):
        def end(self, number: int) -> str:
            order.append(number)
            return ""

    def script(_: Sequence[int], seed: int) -> list[int]:
        return [5, END] if seed < 100 else [5] * 30 + [END]

    episodes, _ = played(tokenizer, Noting(*answers), script, rows=[True] * 2)
    assert (order[0], episodes[0].facts["calls"]) == (0, 3)


@each_case(
    ("limits", "expected"),
    [
        ((8, 64, 2), (2, 0.0 + 1 + 1, False)),
        ((8, 5, 9), (2, 1.0, False)),  # the second answer is cut
        ((8, 4, 9), (1, 1.0, False)),  # what is said would leave no room
        ((8, 3, 9), (1, 1.0, False)),  # there is no room for one
    ],
    ids=["turns", "cut", "filled", "full"],
)
def test_limits_end_an_episode_with_its_reward_so_far(
    tokenizer: PreTrainedTokenizerBase, limits: tuple[int, int, int], expected: tuple[int, float, bool]
) -> None:
    environment = Immediate(None, *[("a", 1.0, False)] * 20)
    (episode,), _ = played(tokenizer, environment, lambda prompt, seed: [5, 6, END], limits=limits)
    response = episode.response
    assert (episode.facts["calls"], sum(episode.rewards.values()), response.finished) == expected
    assert len(response.tokens) <= limits[1]
    assert response.written[-1], "a row ends with an answer, which is what rewards read"
    assert len(response.tokens) == len(response.written) == len(response.log_probs)


def test_a_failure_ends_that_episode(tokenizer: PreTrainedTokenizerBase) -> None:
    class Failing(Immediate):
        def ask(self, number: int, method: str, given: Any) -> None:
            super().ask(number, method, given)
            if (number, method) == (1, "step"):
                self._ready[-1] = (1, AnswerFailure("raised OSError"))

    environment = Failing(None, (None, 1.0, True))
    episodes, _ = played(tokenizer, environment, lambda prompt, seed: [5, END], rows=[True, True, False])
    assert [each.failure for each in episodes] == ["", "raised OSError", ""]
    assert [each.response.finished for each in episodes] == [True, False, False]
    assert episodes[2].response.tokens == (), "padding is not played"
    assert sorted(environment.ended) == [0, 1]
    assert environment.seeds == [0, 100], "each is of its row"


def test_an_environment_may_say_what_an_episode_begins_with(tokenizer: PreTrainedTokenizerBase) -> None:
    environment = Immediate("Hi.", (None, 1.0, True))
    (episode,), engine = played(tokenizer, environment, lambda prompt, seed: [5, END])
    assert episode.prompt == tokenizer("Hi.", add_special_tokens=False)["input_ids"]
    assert engine.asked[0][1] == episode.prompt
    environment = Immediate("A beginning that is far longer than any prompt may be.", (None, 1.0, True))
    (episode,), _ = played(tokenizer, environment, lambda prompt, seed: [5, END])
    assert "more than data.maxPromptTokens (8)" in episode.failure


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ((None, ("a" * 2000, 1.0, False)), (1, 1.0, "")),
        (("a" * 2000,), (0, 0.0, "reset gave 2002 characters, too many for data.maxPromptTokens")),
    ],
)
def test_what_is_far_too_long_is_not_encoded(
    tokenizer: PreTrainedTokenizerBase,
    said: Sequence[Any],
    expected: tuple[int, float, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def encoded(*_: Any) -> list[int]:
        raise AssertionError("it may have gigabytes")

    monkeypatch.setattr(TurnEncoder, "_encoded", encoded)
    (episode,), _ = played(tokenizer, Immediate(*said), lambda prompt, seed: [5, END])
    assert (episode.facts["calls"], sum(episode.rewards.values()), episode.failure) == expected


def test_so_many_episodes_are_played_at_a_time_as_have_sandboxes(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS, "sandboxes:1")
    asked = Job.parse(made("GRPO", ("rollout.tools=['os:getcwd']", "sandbox={warm: 5}")))
    environments = environments_of(asked, Sandboxes.of(asked.spec.sandbox, sharers=2))
    counts: list[int] = []

    class Counting(Immediate):
        def begin(self, number: int, seed: int) -> None:
            super().begin(number, seed)
            counts.append(len(self.seeds) - len(self.ended))

    playing = Counting(None, (None, 1.0, True))
    playing.most = environments.most
    played(tokenizer, playing, lambda prompt, seed: [5, END], rows=[True] * 7)
    assert (max(counts), len(counts)) == (2, 7)


@each_case(
    ("kinds", "error"),
    [
        (("lost", "no sandbox"), EnvironmentProblem),
        (("no sandbox", "raised"), UserCodeError),
        (("late", "ended"), UserCodeError),
        (("lost", None), None),
        (("lost",), None),
    ],
)
def test_a_cluster_without_sandboxes_is_not_the_users_fault(
    kinds: Sequence[Kind | None], error: type[Exception] | None
) -> None:
    job = Job.parse(made("GRPO", ("rollout.tools=['os:getcwd']",)))
    reasons = [("failed" if kind else "", kind or "raised") for kind in kinds]
    with pytest.raises(error, match="failed in all 2 episodes of a rank") if error else nullcontext():
        require_some(job, reasons)
