"""Programs of agents in sandboxes reach the proxy through the connection of their episode, as programs beside it do."""

from collections.abc import Iterator

import pytest

from rlhf_trainer.workers.episodes import EndedEpisode
from tests.trainer.agents.stage import Troupe, answers_on_branches
from tests.trainer.sandbox_pool import pool

LEARNED = {
    "plain": (2, 1, 1.0),
    "edited": (3, 2, 1.0),
    "streamed": (2, 2, None),
    "parallel": (6, 5, 2.0),
    "posts": (1, 1, 3.0),
    "too_often": (6, 6, 0.0),
}
"""Behaviour of a program -> (calls that are answered, branches, reward), as beside the trainer."""


@pytest.fixture(scope="module")
def troupe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    with pool(3) as (sandboxes, _):
        made = Troupe(tmp_path_factory.mktemp("agents"), sandboxes=sandboxes)
        yield made
        made.close()


@pytest.fixture(scope="module")
def episodes(troupe: Troupe) -> dict[str, EndedEpisode]:
    rows = [{"does": each, "patience": 1.0} for each in LEARNED]
    return dict(zip(LEARNED, troupe.play(*rows), strict=True))


def test_episodes_have_the_calls_and_rewards(troupe: Troupe, episodes: dict[str, EndedEpisode]) -> None:
    assert [each.failure for each in episodes.values()] == [""] * len(LEARNED)
    for name, (calls, branches, reward) in LEARNED.items():
        played = episodes[name]
        assert (played.facts["calls"], played.facts["branches"]) == (calls, branches), name
        assert reward is None or sum(played.rewards.values()) == reward, name
    assert answers_on_branches(episodes.values(), troupe.engine.wrote)


def test_a_closed_connection_ends_its_call(troupe: Troupe, episodes: dict[str, EndedEpisode]) -> None:
    assert episodes
    (played,) = troupe.play({"does": "hangs_up"})
    assert (played.failure, sum(played.rewards.values()), played.facts["calls"]) == ("", 1.0, 1)
    assert (played.facts["dropped"], len(troupe.engine.aborted)) == (1, 1)


@pytest.mark.slow
def test_a_lost_sandbox_ends_its_episode_only(troupe: Troupe) -> None:
    *lost, well = troupe.play({"does": "quits"}, {"does": "quits_refused"}, {"does": "plain"})
    assert [each.failure for each in lost] == ["ended its process with exit code 3"] * 2
    assert (well.failure, sum(well.rewards.values())) == ("", 1.0)
