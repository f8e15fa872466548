"""Tests of the project's manifest, advantage and reward; no test runs a job."""

from pathlib import Path

import torch
from better_half import BetterHalf
from brief import score

import rlhf

JOB = rlhf.load(Path(__file__).parent / "job.yaml")[-1]


def test_the_manifest_names_the_algorithm() -> None:
    assert isinstance(JOB.spec.algorithm, BetterHalf)
    assert JOB.trained() == ("actor",)


def test_only_the_better_half_has_an_advantage() -> None:
    returns = torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    algorithm = JOB.spec.algorithm
    assert isinstance(algorithm, BetterHalf)
    assert algorithm.advantage(returns, group_size=4).tolist() == [0, 0, 1, 1, 0, 0, 0, 0]


def test_a_short_answer_that_ends_is_rewarded() -> None:
    assert score(["?"] * 3, ["yes", "yes", "well , yes"], [True, False, True], longest=2) == [1, 0, 0]
