"""What the model wrote stays as it was sampled, what the environment says comes between, and no episode waits."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_api.job import Job
from rlhf_trainer.data.turns import TurnEncoder
from rlhf_trainer.environments.of_job import environments_of
from rlhf_trainer.errors import EnvironmentProblem, UserCodeError
from rlhf_trainer.rewards.sandboxes import ADDRESS, Sandboxes
from rlhf_trainer.rewards.supervision import AnswerFailure, Kind
from rlhf_trainer.workers.episodes import Episode, EpisodeLimits, Play, require_some
from tests.api.cases import made
from tests.each import each_case
from tests.trainer.environments.scripted import END, LOG_PROB, ScriptedEngine
from tests.trainer.tiny import EXAMPLE_MODEL

PROMPT = [10, 11, 12]
LIMITS = EpisodeLimits(prompt_tokens=8, tokens=64, turns=3)


class Immediate:
    """Answers at once, and notes what it was asked."""

    def __init__(self, *said: Any) -> None:
        """said: to the reset and to each step of every episode."""
        self.said = said
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


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(EXAMPLE_MODEL))


def played(
    tokenizer: PreTrainedTokenizerBase,
    environment: Any,
    script: Any,
    *,
    limits: EpisodeLimits = LIMITS,
    rows: Sequence[dict[str, Any] | None] = ({},),
) -> tuple[list[Episode], ScriptedEngine]:
    class Engine(ScriptedEngine):
        pass

    Engine.script = staticmethod(script)
    engine: Any = Engine()
    episodes = [Episode(list(PROMPT), partial(operator.add, 100 * place), row) for place, row in enumerate(rows)]
    encoder, ended = TurnEncoder(tokenizer, chat_template="Auto"), list[int]()
    Play(engine, environment, encoder, limits=limits, ended=ended.append).play(episodes)
    assert sorted(ended) == [place for place, row in enumerate(rows) if row is not None], "each is told once"
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
    assert episode.tokens == [*sampled, END, *more, *sampled, END]
    assert episode.written == [True] * 3 + [False] * len(more) + [True] * 3
    assert episode.log_probs == [LOG_PROB] * 3 + [0.0] * len(more) + [LOG_PROB] * 3
    assert episode.rewards == [0.0, 0.0, 0.5, *[0.0] * len(more), 0.0, 0.0, 2.0]
    assert (episode.finished, episode.turns, episode.failure) == (True, 2, "")
    assert engine.asked == [(0, PROMPT, 0, 64), (0, [*PROMPT, *sampled, END, *more], 1, 61 - len(more))]
    text = tokenizer.decode(sampled)
    assert environment.asked == [(0, "reset", {}), (0, "step", text), (0, "step", text)]
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
    episodes, _ = played(tokenizer, environment, lambda prompt, seed: [5, END], rows=[{}, {}, {}])
    assert [(each.turns, each.finished) for each in episodes] == [(3, True)] * 3
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

    episodes, _ = played(tokenizer, Noting(*answers), script, rows=[{}, {}])
    assert (order[0], episodes[0].turns) == (0, 3)


@each_case(
    ("limits", "expected"),
    [
        (EpisodeLimits(prompt_tokens=8, tokens=64, turns=2), (2, 0.0 + 1 + 1, False)),
        (EpisodeLimits(prompt_tokens=8, tokens=5, turns=9), (2, 1.0, False)),  # the second answer is cut
        (EpisodeLimits(prompt_tokens=8, tokens=4, turns=9), (1, 1.0, False)),  # what is said would leave no room
        (EpisodeLimits(prompt_tokens=8, tokens=3, turns=9), (1, 1.0, False)),  # there is no room for one
    ],
    ids=["turns", "cut", "filled", "full"],
)
def test_limits_end_an_episode_with_its_reward_so_far(
    tokenizer: PreTrainedTokenizerBase, limits: EpisodeLimits, expected: tuple[int, float, bool]
) -> None:
    environment = Immediate(None, *[("a", 1.0, False)] * 20)
    (episode,), _ = played(tokenizer, environment, lambda prompt, seed: [5, 6, END], limits=limits)
    assert (episode.turns, sum(episode.rewards), episode.finished) == expected
    assert len(episode.tokens) <= limits.tokens
    assert episode.written[-1], "a row ends with an answer, which is what rewards read"
    assert len(episode.tokens) == len(episode.written) == len(episode.log_probs) == len(episode.rewards)


def test_a_failure_ends_that_episode(tokenizer: PreTrainedTokenizerBase) -> None:
    class Failing(Immediate):
        def ask(self, number: int, method: str, given: Any) -> None:
            super().ask(number, method, given)
            if (number, method) == (1, "step"):
                self._ready[-1] = (1, AnswerFailure("raised OSError"))

    environment = Failing(None, (None, 1.0, True))
    episodes, _ = played(tokenizer, environment, lambda prompt, seed: [5, END], rows=[{}, {}, None])
    assert [each.failure for each in episodes] == ["", "raised OSError", ""]
    assert [each.finished for each in episodes] == [True, False, False]
    assert episodes[2].tokens == [], "padding is not played"
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
    assert (episode.turns, sum(episode.rewards), episode.failure) == expected


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

    limits = replace(LIMITS, episodes=environments.most)
    playing = Counting(None, (None, 1.0, True))
    played(tokenizer, playing, lambda prompt, seed: [5, END], limits=limits, rows=[{}] * 7)
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
