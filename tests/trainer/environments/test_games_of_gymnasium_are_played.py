"""A text game with the interface of Gymnasium is an environment, with no line of the user's."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Text

from rlhf_trainer.environments.environments import Environments
from rlhf_trainer.rewards.supervision import AnswerFailure
from tests.trainer.environments.test_whatever_an_environment_does_ends_its_episode_only import PATIENT, asked

HERE = "tests.trainer.environments.test_games_of_gymnasium_are_played"
GAME = "rlhf_trainer.environments.gymnasium_games:Game"


class Guess(gymnasium.Env[str, str]):
    """Which number is it?"""

    def __init__(self, highest: int) -> None:
        self.observation_space = self.action_space = Text(max_length=99)
        self._highest = highest

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._number = int(self.np_random.integers(self._highest))
        return f"Below {self._highest}:", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f" No, {self._number}.", float(action == str(self._number)), action == str(self._number), False, {}


gymnasium.register("Guess-v0", entry_point=f"{HERE}:Guess", max_episode_steps=3)


@pytest.fixture
def games() -> Any:
    options = {"id": f"{HERE}:Guess-v0", "highest": 1000}
    made = Environments([GAME], arguments=options, seconds=PATIENT, path="job: spec.rollout.environment")
    yield made
    made.close()


def test_a_game_is_played_until_it_is_won_or_its_time_is_over(games: Environments) -> None:
    games.begin(0, seed=0)
    assert asked(games, {0: ("reset", {"prompt": "Play."})}) == {0: "Below 1000:"}
    observation, reward, done = asked(games, {0: ("step", "x")})[0]
    assert (reward, done) == (0.0, False)
    number = observation.removeprefix(" No, ").removesuffix(".")
    assert asked(games, {0: ("step", number)}) == {0: [None, 1.0, True]}
    games.begin(1, seed=1)
    asked(games, {1: ("reset", {})})
    assert [asked(games, {1: ("step", "x")})[1][2] for _ in range(3)] == [False, False, True]


def test_responses_to_a_prompt_play_the_same_game(games: Environments) -> None:
    rows = [{"seed": 4}, {"seed": 4}, {}, {}]
    for number in range(4):
        games.begin(number, seed=number)
    asked(games, {number: ("reset", row) for number, row in enumerate(rows)})
    one, other, third, fourth = (asked(games, {number: ("step", "x")})[number][0] for number in range(4))
    assert one == other
    assert third != fourth


def test_a_game_that_does_not_speak_is_a_sentence() -> None:
    made = Environments([GAME], arguments={"id": "FrozenLake-v1"}, seconds=PATIENT, path="job: spec.rollout")
    made.begin(0, seed=0)
    found = asked(made, {0: ("reset", {})})[0]
    made.close()
    assert found == AnswerFailure(
        "reset gave a value of type int, expected a text, or messages of role and content, both texts",
        kind="raised",
    )
