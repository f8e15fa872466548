"""pass@k and means over several responses to a prompt."""

from itertools import combinations

import pytest

from rlhf_trainer.run.evaluation import means, passes_at
from rlhf_trainer.workers.scoring import JudgedRow

SCORES = [1.0, 0.0, 0.5, 1.0, None, 0.0] + [0.0] * 6 + [1.0] * 6
"""Three prompts of six responses, of which 2, 0 and 6 pass."""


def rows() -> list[JudgedRow]:
    return [
        JudgedRow(prompt="p", response="r", finished=True, response_tokens=3, scores={"right": score})
        for score in SCORES
    ]


def by_counting(k: int) -> float:
    """The share of all choices of k responses to a prompt in which one passes, as a mean over the prompts."""
    shares = []
    for start in range(0, len(SCORES), 6):
        choices = list(combinations(SCORES[start : start + 6], k))
        shares.append(sum(1.0 in choice for choice in choices) / len(choices))
    return sum(shares) / len(shares)


def test_it_is_the_share_of_all_choices_in_which_one_passes() -> None:
    found = passes_at(rows(), "right", samples=6)
    assert list(found) == [2, 4, 6]
    assert found == {k: pytest.approx(by_counting(k)) for k in found}
    assert found[6] == pytest.approx(2 / 3)


def test_one_response_to_a_prompt_has_none() -> None:
    assert passes_at(rows(), "right", samples=1) == {}


def test_the_mean_is_over_all_responses_that_have_a_score() -> None:
    assert means(rows())["right"] == pytest.approx(8.5 / 17)
