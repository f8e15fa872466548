"""`why` names the cause that was planted in a run, and none in healthy runs; records of real runs, see plants.py."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rlhf_trainer.report.run_record import read_run
from rlhf_trainer.why.diagnosis import CAUSES, SIGNALS, described, diagnose
from rlhf_trainer.why.rules import RULES
from rlhf_trainer.why.seen import Seen, is_apart
from tests.trainer.why.figures import alarms, names_of, places
from tests.trainer.why.plants import FIGURES, HEALTHY_FIGURES, PLANTS, TUNING, make, read


@pytest.fixture(scope="module")
def found() -> dict[str, list[int]]:
    """The place of each true cause, for the seeds of the figures."""
    return places(FIGURES)


def test_the_true_cause_is_first_in_10_of_12(found: dict[str, list[int]]) -> None:
    assert len(found) == 12
    for seed, of_a_seed in zip(FIGURES, zip(*found.values(), strict=True), strict=True):
        assert sum(place == 1 for place in of_a_seed) >= 10, (seed, found)
        assert all(1 <= place <= 3 for place in of_a_seed), (seed, found)


@pytest.mark.parametrize("watching", [False, True], ids=["at the end", "at every look"])
def test_19_of_20_healthy_runs_give_no_alarm(watching: bool) -> None:
    given = alarms(HEALTHY_FIGURES, watching=watching)
    assert len(given) == 20
    assert sum(not causes for causes in given.values()) >= 19, given


def test_every_cause_has_a_rule_and_a_plant() -> None:
    names = [row.cause for row in CAUSES]
    assert sorted(names) == sorted(RULES) == sorted(plant.cause for plant in PLANTS.values())


class Noted(Mapping[str, float]):
    """A record that notes the names of the metrics that are read."""

    def __init__(self, record: Mapping[str, float], names: set[str]) -> None:
        self._record, self._names = record, names

    def __getitem__(self, name: str) -> float:
        self._names.add(name)
        return self._record[name]

    def __contains__(self, name: object) -> bool:
        self._names.add(str(name))
        return name in self._record

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self._record)


def test_the_table_names_every_metric_that_a_rule_reads() -> None:
    """Those are the signals that an answer compares."""
    names = set[str]()
    for plant in PLANTS:
        seen = read(plant)[TUNING[0]]
        noted = Seen(seen.spec, [Noted(record, names) for record in seen.records], seen.rows)
        for rule in RULES.values():
            rule(noted)
    assert {name for name in names - {"step"} if name not in SIGNALS and not is_apart(name)} <= {"evaluation/reward"}


def test_an_answer_has_evidence_a_remedy_and_rows() -> None:
    answer = diagnose("job", read("kl-zero")[FIGURES[0]])
    cause = answer.causes[0]
    assert "held-out reward went from" in cause.evidence
    assert "Penalise" in cause.remedy
    assert 0 < len(answer.rows) <= 20
    assert answer.change is not None
    assert answer.document()["causes"][0]["cause"] == "NoKLPenalty"


def test_rows_show_the_first_cause_and_nothing_else() -> None:
    kinds = {"healthy-ppo": [], "kl-sign": [], "cut-pays": [False], "no-end": [False]}
    for name, expected in kinds.items():
        rows = diagnose("job", read(name)[FIGURES[0]]).rows
        assert sorted({row["finished"] for row in rows}) == expected, name
    after = diagnose("job", read("learning-rate")[FIGURES[0]])
    told = re.search(r"update of step (\d+)", after.causes[0].evidence)
    assert told
    assert after.rows
    assert min(row["step"] for row in after.rows) > int(told[1])
    row = {**after.rows[0], "prompt": "Add 3\n" + 60 * "x", "response": "no\nidea"}
    assert f": Add 3 {34 * 'x'} … (26 more characters) -> no idea" in described(row)


def test_without_rows_the_answer_says_what_it_cannot_see() -> None:
    seen = read("mixed-groups")[FIGURES[0]]
    answer = diagnose("job", Seen(seen.spec, seen.records))
    assert "rollout.keep" in answer.notes[0]
    of_a_pupil = Seen({"algorithm": {"name": "SFT"}}, [{"step": step, "loss/actor": 1 / step} for step in range(1, 9)])
    assert not diagnose("job", of_a_pupil).notes, "a job without generation and reward lacks neither"
    assert "MixedGroups" not in [cause.cause for cause in answer.causes]


def test_a_job_without_steps_has_no_cause() -> None:
    answer = diagnose("job", Seen({}, []))
    assert not answer.causes
    assert answer.change is None


@pytest.mark.slow
def test_two_plants_made_anew_show_their_cause(tmp_path: Path) -> None:
    runs = [("learning-rate", 7), ("scale", 7)]
    make(tmp_path, runs)
    run = read_run(tmp_path)
    for name, seed in runs:
        job = run[f"{name}-{seed}"]
        assert names_of(job.seen())[0] == PLANTS[name].cause
        kept = read(name)[FIGURES[0]].records[0]
        assert kept.keys() <= job.records[0].keys(), "the records are of another version"
