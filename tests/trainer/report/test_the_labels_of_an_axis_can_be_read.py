"""Labels of an axis are inside the picture, and no two of one axis are the same."""

import re
from pathlib import Path

from rlhf_planning.numbers import number, ticks
from rlhf_trainer.report.plots import lines
from tests.each import each_case
from tests.trainer.report.conftest import PPO, page_of, ppo_record, run_job

CHARACTER = 4.0
"""Points of a character of the labels (8.5 points high), as few as fonts have."""


@each_case(
    "values",
    [
        [0.0, 1.0],
        [1.0e6, 1.0004e6],
        [-123456.0, 654321.0],
        [1.0, 1.0002],
        [-2.5e-7, 1e-7],
        [1.2e10, 1.3e10],
        [1e15, 2e15],
    ],
)
def test_labels_are_neither_cut_nor_alike(values: list[float]) -> None:
    svg = lines("name", {0: ([1, 2], values)})
    placed = re.findall(r"<text style=\"[^\"]*?text-anchor: end[^\"]*\" x=\"([-\d.]+)\"[^>]*>([^<]*)</text>", svg)
    assert len(placed) >= 2, svg
    assert len({label for _, label in placed}) == len(placed)
    assert all(float(end) >= CHARACTER * len(label) for end, label in placed), placed


def test_ticks_take_the_digits_that_they_need() -> None:
    assert ticks([0, 0.5, 1]) == ["0", "0.5", "1"]
    assert ticks([1.0, 1.00001, 1.00002]) == ["1", "1.00001", "1.00002"]
    assert ticks([12345.1, 12345.2]) == ["12,345.1", "12,345.2"]
    assert ticks([1_000_000, 1_000_500]) == ["1 M", "1.0005 M"]
    assert (number(13.1e9), number(2.5e12), number(999_999)) == ("13.1 G", "2.5 T", "999,999")


def test_a_series_that_only_rounding_changes_is_a_number(tmp_path: Path) -> None:
    records = [{**ppo_record(step), "response_finished/mean": 1.0 - 1e-7 * step} for step in (1, 2, 3)]
    run_job(tmp_path, PPO, records)
    page = page_of(tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert "response_finished/mean <b>1</b>" in html
    assert "<b>response_finished/mean</b>" not in html
    assert "reward/mean" in page.sections["helpful-ppo"]


def test_a_long_series_is_drawn_by_means_and_their_range() -> None:
    """Of 400 steps each point is two: the means are 0, so only the band below and above them needs these labels."""
    svg = lines("name", {0: (range(1, 401), [-3.0, 3.0] * 200)})
    assert re.findall(r">([^<>]*)</text>", svg)[-3:] == ["−2", "0", "2"]  # noqa: RUF001 the minus of a label
