"""Successive halving: the rungs that a budget allows, who goes on, and what a user may write wrongly."""

import re
from collections.abc import Sequence

import pytest

from rlhf_api.problems import SpecError
from rlhf_planning.halving import Rung, Search, Trial, halve, rungs_of, steps_of, trials_of


def test_a_budget_allows_the_latest_first_rung() -> None:
    for (trials, steps, budget), expected in {
        (9, 100, 900): [(9, 100)],
        (9, 100, 899): [(9, 33), (8, 100)],
        (9, 100, 497): [(9, 11), (8, 33), (3, 100)],
        (9, 100, 400): [(9, 11), (4, 33), (3, 100)],
        (9, 100, 232): [(9, 11), (3, 33), (1, 100)],
        (2, 9, 12): [(2, 3), (1, 9)],
        (1, 5, 5): [(1, 5)],
        (9, 4, 20): [(9, 1), (3, 4)],
    }.items():
        rungs = rungs_of(trials, steps, budget)
        assert [*map(tuple, rungs)] == expected
        assert steps_of(rungs) <= budget
    assert steps_of(rungs_of(9, 100, 232)) == 9 * 11 + 3 * 22 + 67
    with pytest.raises(SpecError, match=r"is 231 steps; 9 trials of 100 steps need 232 or more \(9 to step 11, 3 to"):
        rungs_of(9, 100, 231)
    with pytest.raises(SpecError, match="9 trials of 2 steps need 18 or more"):
        rungs_of(9, 2, 17)


def test_a_third_goes_on_and_a_failed_trial_is_a_row() -> None:
    gains = {f"t{number}": number for number in range(1, 10)}
    for measure, expected in (("evaluation/reward", ["t8", "t7"]), ("evaluation/loss", ["t1", "t2"])):
        trials, seen = [Trial(name, ["job:a.lr=1"]) for name in gains], list[tuple[int, list[str]]]()

        def run(going: Sequence[Trial], rung: Rung) -> None:
            seen.append((rung.step, [trial.name for trial in going]))  # noqa: B023 it is called in this round
            for trial in going:
                trial.step, trial.value = rung.step, float(gains[trial.name])
                trial.reason = "too far" if trial.name == "t9" else ""

        best = halve(Search([], measure, trials, [Rung(9, 3), Rung(2, 9)]), run)
        assert best
        assert (best.name, seen[1]) == (expected[0], (9, expected))
        for trial in trials:
            trial.reason = f"{trial.name} is too far"
        none = Search([], measure, trials, [Rung(9, 3)])
        assert halve(none, lambda *_: None) is None
        assert none.failure == f"no trial is left; {min(expected)} failed: {min(expected)} is too far"


def test_each_combination_of_values_is_a_trial() -> None:
    trials = trials_of(["spec.a.b=1e-4, 2e-4", "job:c=x,2,null"], "job")
    assert [trial.name for trial in trials] == [f"t{number}" for number in range(1, 7)]
    assert trials[0].sets == ["job:a.b=1e-4", "job:c=x"]
    assert trials[5].sets == ["job:a.b=2e-4", "job:c=null"]
    for text, sentence in {
        "sft:a=1,2": "all trials share sft; vary a field of job, or name another --job",
        **dict.fromkeys(["metadata.name=a,b", "metadata=a,b"], "names the job, expected a field of its spec"),
        "checkpoint.pauseAfterStep=1,2": "is the same in all trials",
        "a={b: 1},{b: 2}": "a list or a mapping cannot be varied",
        **dict.fromkeys(
            ["a=1", "a=1,1", "a=1,", "a", "=1,2", "a..b=1,2"], "expected path=value,value with different values"
        ),
    }.items():
        with pytest.raises(SpecError, match=f"^--vary {re.escape(text)}: {sentence}$"):
            trials_of([text], "job")
    with pytest.raises(SpecError, match="is varied twice"):
        trials_of(["a=1,2", "spec.a=3,4"], "job")
