"""Ties, missing scores and margins: edges of what is measured on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_trainer.report.held_out import measures
from rlhf_trainer.run.evaluation import means, passes_at, win_rate
from rlhf_trainer.workers.scoring import JudgedRow
from tests.each import each_case


def rows(*scores: float | None) -> list[JudgedRow]:
    return [
        JudgedRow(prompt="a", response="b", finished=number % 2 == 0, response_tokens=number, scores={"rule": score})
        for number, score in enumerate(scores)
    ]


@each_case(
    ("after", "before", "rate"),
    [
        ([1.0], [0.0], 1.0),
        ([0.0], [1.0], 0.0),
        ([1.0], [1.0], 0.5),
        ([None], [1.0], 0.5),
        ([1.0], [None], 0.5),
        ([None], [None], 0.5),
        ([1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0], 0.5),
        ([1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0], 0.625),
    ],
)
def test_a_tie_is_half_a_win(after: Sequence[float | None], before: Sequence[float | None], rate: float) -> None:
    assert win_rate(rows(*after), rows(*before), "rule") == rate


def test_a_row_without_a_score_is_no_zero() -> None:
    found = means(rows(1.0, None, 0.5))
    assert found == {"rule": 0.75, "response_tokens": 1.0, "response_finished": pytest.approx(2 / 3)}


def test_a_response_passes_with_the_whole_score() -> None:
    assert passes_at(rows(0.999, None, 1.0, 0.0), "rule", samples=2) == {2: 0.5}


@each_case(
    ("wins", "ties", "losses", "is_gain"),
    [(20, 0, 0, True), (0, 0, 20, False), (11, 0, 9, None), (0, 20, 0, None), (8, 12, 0, True), (0, 12, 8, False)],
)
def test_a_gain_lies_outside_of_the_margin(wins: int, ties: int, losses: int, is_gain: bool | None) -> None:
    """95 % of a mean: 11 wins of 20 say nothing, 8 wins and 12 ties say that responses are better."""
    changes = [1.0] * wins + [0.0] * ties + [-1.0] * losses
    samples = [{"reward_before": 0.0, "reward_after": change} for change in changes]
    rate = (wins + ties / 2) / len(changes)
    job: Any = SimpleNamespace(name="job", samples=samples, summary={"win_rate": rate, "win_rate_null": 0.5})
    (row,) = measures(job)
    assert (row.after, row.is_gain) == (f"{rate:.4g}", is_gain)
