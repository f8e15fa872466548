"""Machines join and leave a rollout pool at any moment: each row is learned once, as if the pool had stayed."""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rlhf_api.names import Role
from rlhf_trainer.errors import CommunicationError
from rlhf_trainer.run import elastic_pool
from rlhf_trainer.run.elastic_pool import are_lost, copy_here
from rlhf_trainer.run.on_ray import RayRuntime, ReplaceablePool
from tests.patience import PATIENCE_SECONDS
from tests.trainer.elastic.light_machines import LightMachines, light_machines
from tests.trainer.elastic.machines import MOST, ROWS, Machines, Run, elastic_job, machines, run
from tests.trainer.placement import sweep
from tests.trainer.tiny import save_tiny

STEPS = 4
JOINS = 8
"""Seed with which a machine joins at the first idle moment, and one leaves soon after the call begins."""
LATEST_SECONDS = 0.4
"""Latest time of a kill after a generating call begins; the call takes about twice as long."""
IDLE, GENERATING, ENDED, REPLACE = "gather", "copy", "has_lost", "replace"
"""Methods of the pool at which a moment begins: between two calls, during one, before its rows are read, at repair."""


class Schedule:
    """Machines that join and leave: one at each moment, in random order, or as given. There is always one."""

    def __init__(self, there: Machines | LightMachines, seed: int, moments: Sequence[str]) -> None:
        """moments: of each step; empty: random ones."""
        self._there, self._random = there, random.Random(seed)
        some = [IDLE, GENERATING, ENDED, self._random.choice([IDLE, GENERATING])]
        self._moments = dict(enumerate(moments or self._random.sample(some, STEPS), 1))
        self._calls = dict.fromkeys((IDLE, GENERATING, ENDED, REPLACE), 0)
        self.changes: list[str] = []

    @property
    def surprises(self) -> int:
        """Number of failed calls above the number of machines that left during calls."""
        return self._calls[REPLACE] - [*self._moments.values()].count(GENERATING)

    def disturb(self, _: RayRuntime, patch: pytest.MonkeyPatch) -> None:
        for moment in self._calls:
            patch.setattr(ReplaceablePool, moment, self._at(moment, getattr(ReplaceablePool, moment)))

    def _at(self, moment: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def changed(pool: ReplaceablePool, *arguments: Any) -> Any:
            self._calls[moment] += 1
            planned = self._moments.get(self._calls[moment])
            is_now = planned == moment
            if moment == IDLE and planned == GENERATING and len(self._there.writers) == 1:
                self._join(moment)  # which takes longer than the call does
            if is_now and moment == IDLE and len(self._there.writers) < MOST and self._random.random() < 0.6:
                self._join(moment)
            elif is_now and moment == IDLE:
                self._leave(moment)
            found = method(pool, *arguments)
            if is_now and moment == ENDED:
                self._leave(moment)
            if is_now and moment == GENERATING:
                self._leave(moment, after=self._random.uniform(0, LATEST_SECONDS))
            return found

        return changed

    def _join(self, moment: str) -> None:
        self._there.add()
        self.changes.append(f"one joins in {moment}")

    def _leave(self, moment: str, after: float = 0.0) -> None:
        """Have a machine leave `after` seconds; another joins first if there is only one."""
        lost = self._random.choice(self._there.writers)
        if self._there.writers == [lost]:
            self._join(moment)
        self.changes.append(f"one leaves in {moment}")
        self._there.writers.remove(lost)
        threading.Timer(after, self._there.lose, [lost]).start() if after else self._there.lose(lost)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Role, str]:
    return {"actor": save_tiny(tmp_path_factory.mktemp("model") / "actor", seed=3)}


@pytest.fixture(scope="module")
def undisturbed(folders: Mapping[Role, str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """At staleness 0, on processes without Ray: there the pool keeps its one machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    found = sweep.run(folder, elastic_job(folder, folders, count=STEPS), folders)
    return Run.of(found.records, folder)


def disturbed(
    folder: Path,
    folders: Mapping[Role, str],
    undisturbed: Run,
    *,
    seed: int,
    staleness: int,
    writers: int,
    moments: Sequence[str] = (),
    partial: str | None = None,
    is_light: bool = False,
) -> Run:
    """is_light: without Ray, on machines that the test plays."""
    one = elastic_job(folder, folders, count=STEPS, staleness=staleness, partial=partial)
    with light_machines(folder / "light", writers) if is_light else machines(writers) as there:
        schedule = Schedule(there, seed, moments)
        found = run(folder, one, folders, schedule.disturb)
    print(seed, staleness, schedule.changes, found.said, [each["rollout_repeated_rows"] for each in found.records])  # noqa: T201
    assert found.learned.keys() == undisturbed.learned.keys()
    assert all(found.learned[key][0] == prompt for key, (prompt, _) in undisturbed.learned.items())
    assert all(record["staleness"] <= staleness for record in found.records)
    assert found.total("rollout_replacements") == 0
    assert found.total("rollout_resizes") == len([each for each in found.said if " -> " in each]) >= 1
    assert not found.total("rollout_repeated_rows") % ROWS
    if not staleness:
        assert schedule.surprises <= 0
        assert found.learned == undisturbed.learned
        assert found.losses() == undisturbed.losses()
    return found


@pytest.mark.parametrize(
    "is_light", [pytest.param(True, id="light"), pytest.param(False, id="Ray", marks=pytest.mark.slow)]
)
def test_no_row_is_lost_or_learned_twice(
    folders: Mapping[Role, str], undisturbed: Run, tmp_path: Path, is_light: bool
) -> None:
    """One joins before the second step, and it or the other leaves in the third."""
    moments = ["", IDLE, GENERATING]
    options: dict[str, Any] = {"staleness": 0, "writers": 1, "moments": moments, "is_light": is_light}
    found = disturbed(tmp_path, folders, undisturbed, seed=JOINS, **options)
    assert [record["rollout_nodes"] for record in found.records] == [1, 2, 1, 1]
    assert [record["rollout_repeated_rows"] for record in found.records] == [0, 0, ROWS, 0]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("seed", range(10))
def test_no_schedule_loses_a_row_or_has_it_learned_twice(
    folders: Mapping[Role, str], undisturbed: Run, tmp_path: Path, seed: int, staleness: int
) -> None:
    disturbed(tmp_path, folders, undisturbed, seed=seed, staleness=staleness, writers=1 + seed % 2)


@pytest.mark.slow
def test_machines_leave_while_new_weights_meet_responses(
    folders: Mapping[Role, str], undisturbed: Run, tmp_path: Path
) -> None:
    moments = ["", IDLE, GENERATING, IDLE]
    disturbed(tmp_path, folders, undisturbed, seed=1, staleness=2, writers=2, moments=moments, partial="Continue")


@pytest.mark.slow
def test_below_its_fewest_machines_a_pool_waits(folders: Mapping[Role, str], tmp_path: Path) -> None:
    """The pool waits for a machine; without one the attempt ends, and the pool is to blame."""
    with machines(2) as there:

        def lose(_: RayRuntime, patch: pytest.MonkeyPatch) -> None:
            gather, calls = ReplaceablePool.gather, iter(range(1, STEPS + 1))

            def losing(pool: ReplaceablePool) -> None:
                call = next(calls)
                if call > 1:
                    there.lose(there.writers.pop(0))
                waits = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: there.add() if call == 2 else None)
                patch.setattr(elastic_pool, "time", waits)
                patch.setattr(elastic_pool, "POOL_DEADLINE_SECONDS", 5.0 if call == 3 else PATIENCE_SECONDS)
                gather(pool)

            patch.setattr(ReplaceablePool, "gather", losing)

        with pytest.raises(CommunicationError, match="rollout pool writers has 1 of the 2 nodes that it needs"):
            run(tmp_path, elastic_job(tmp_path, folders, count=STEPS, fewest=2), folders, lose)
    steps = {row["step"] for row in Run.of([], tmp_path).rows}
    assert steps == {1, 2}


@ray.remote(num_cpus=0)
class Maker:
    def make(self, value: float) -> list[float]:
        return [value] * 100

    def add(self, *values: list[float]) -> float:
        return sum(map(sum, values))


@pytest.mark.slow
def test_a_copy_outlives_the_machine_that_made_the_rows() -> None:
    with machines(1) as there:
        start: Any = Maker
        maker, reader = (start.options(resources={f"rlhf-pool-{of}": 1}).remote() for of in ("writers", "train"))
        rows, others = maker.make.remote(1.0), maker.make.remote(2.0)
        copy_here([rows])
        assert not are_lost([rows], deadline=PATIENCE_SECONDS)
        ray.wait([others], fetch_local=False)
        there.lose(there.writers.pop(0))
        assert not are_lost([rows], deadline=PATIENCE_SECONDS)
        assert ray.get(reader.add.remote(rows)) == 100
        assert are_lost([rows, others], deadline=PATIENCE_SECONDS)
