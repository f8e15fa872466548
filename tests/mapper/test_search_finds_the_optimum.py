"""The pruned search against the exhaustive one, on tables as uneven as costs may be; and what both promise."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import pytest

from rlhf_mapper.search import pruned as pruned_search
from rlhf_mapper.search.objective import Objective
from rlhf_mapper.search.pruned import pruned
from rlhf_mapper.search.tables import Found, StageTable, placements
from tests.each import each_case
from tests.mapper.oracles.exhaustive import exhaustive

MODELS = ("actor", "cost", "critic", "reference", "reward")
Search = Callable[..., list[Found]]
pytestmark = pytest.mark.filterwarnings("error")


@dataclass(frozen=True)
class Tables:
    """Costs that are written down."""

    groups: Sequence[int]
    tables: Mapping[tuple[frozenset[str], int], StageTable]
    one_host: bool = False
    """Whether all groups are of the same nodes."""

    @property
    def hosts(self) -> Sequence[frozenset[tuple[int, str]]]:
        return [frozenset({(0 if self.one_host else group, "")}) for group in range(len(self.groups))]

    def of(self, models: frozenset[str], group: int) -> StageTable:
        return self.tables[models, group]


def subsets(models: Sequence[str]) -> list[frozenset[str]]:
    return [frozenset(some) for size in range(1, len(models) + 1) for some in combinations(models, size)]


def table(rng: np.random.Generator, most: int, options: int) -> StageTable:
    """Seconds that go up and down with GPUs, with ties, with sizes that do not fit and with stages without work."""
    sizes = np.arange(1, most + 3 if rng.random() < 0.9 else 3 * most)
    gpus = np.sort(rng.choice(sizes, min(options, most), replace=False)).astype(np.int64)
    seconds = rng.random((3, len(gpus))) if rng.random() < 0.5 else rng.integers(0, 5, (3, len(gpus))).astype(float)
    if rng.random() < 0.5:
        seconds += rng.integers(0, 40, (3, 1)) / gpus
    seconds[rng.random(3) < 0.3] = 0
    seconds[:, rng.random(len(gpus)) < 0.15] = np.inf
    return StageTable(gpus, seconds)


def uneven(seed: int) -> tuple[Tables, tuple[str, ...]]:
    """One to five models on one or two node groups, or one in two ways; every tenth with many sizes."""
    rng = np.random.default_rng(seed)
    models = MODELS[: (1, 2, 3, 3, 4, 3, 2, 4, 3, 5 if seed % 40 == 9 else 2)[seed % 10]]
    many = seed % 10 == 6
    groups = [int(most) for most in rng.integers(40, 90, 1) if many] or rng.integers(2, 14, rng.integers(1, 3)).tolist()
    options = 60 if many else 3 if len(models) == 5 else 6
    tables = {
        (some, group): table(rng, most, int(rng.integers(1, options + 1)))
        for some in subsets(models)
        for group, most in enumerate(groups)
    }
    return Tables(groups, tables, one_host=rng.random() < 0.2), models


def falling(groups: Sequence[int]) -> Tables:
    """Costs as they are: work over GPUs and a constant, uneven by a tenth, the same for a size in any cluster."""
    tables = {}
    for some in subsets(MODELS[:4]):
        rng = np.random.default_rng(sorted(map(MODELS.index, some)))
        work = np.array([[900.0 * ("actor" in some)], [100.0 * len(some)], [500.0 * len(some & {"actor", "critic"})]])
        gpus = np.arange(1, 65)
        seconds = (work / gpus + 3 * (work > 0)) * rng.uniform(1, 1.1, (3, len(gpus)))
        seconds[:, : 2 * len(some) - 1] = np.inf
        for group, most in enumerate(groups):
            tables[some, group] = StageTable(gpus[:most], seconds[:, :most])
    return Tables(groups, tables)


def objectives(costs: Tables, fastest: Sequence[Found], seed: int) -> list[Objective]:
    """Time, fewest GPUs in the median time, and price."""
    every = [found.seconds for found in fastest] or [1.0]
    prices = np.random.default_rng(seed).integers(0, 4, len(costs.groups)) / 2
    found = [
        Objective(),
        Objective("fewest_gpus", most_seconds=float(np.median(every))),
        Objective("lowest_cost", prices=tuple(prices.tolist())),
    ]
    return [replace(each, works_ahead=True) for each in found] if seed % 4 == 1 else found


def score(found: Found, objective: Objective) -> tuple[object, ...]:
    """What is specified of an answer."""
    prices = objective.prices or (1.0,) * (1 + max(group for _, group, _ in found.sets))
    price = sum(gpus * prices[group] for _, group, gpus in found.sets)
    return [models for models, _, _ in found.sets], found.seconds, price


@pytest.mark.parametrize("seed", [*range(48), *(pytest.param(each, marks=pytest.mark.slow) for each in range(48, 200))])
def test_pruning_changes_no_answer(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    costs, models = uneven(seed)
    monkeypatch.setattr(pruned_search, "WAVE", (1024, 3)[seed % 2])
    keep = (4, 1, 100)[seed % 3]
    fastest = exhaustive(costs, models)
    chosen = objectives(costs, fastest, seed)
    if chosen[0].works_ahead:  # the second of four stages is the transition
        ahead = {key: StageTable(each.gpus, each.seconds[[0, 1, 1, 2]]) for key, each in costs.tables.items()}
        costs = replace(costs, tables=ahead)
    for objective in chosen:
        every = fastest if objective == Objective() else exhaustive(costs, models, objective)
        found = pruned(costs, models, keep, objective)
        assert [score(answer, objective) for answer in found] == [score(answer, objective) for answer in every[:keep]]


STREAMS = ((0.25, 1.0), (0.5, 0.6), (1.0, 0.3))


@pytest.mark.parametrize("seed", range(0, 48, 3))
def test_pruning_changes_no_answer_where_scoring_streams(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The set of the first model generates; of the others' scoring a part is left when generation has ended."""
    costs, models = uneven(seed)
    monkeypatch.setattr(pruned_search, "WAVE", (1024, 3)[seed % 2])
    early = dict(costs.tables)
    for key, table in costs.tables.items():
        first, second, third = table.seconds
        is_generator = models[0] in key[0]
        nothing = 0.0 * np.nan_to_num(first)
        writes = [first, second, nothing] if is_generator else [nothing, nothing, second]
        early[key] = StageTable(table.gpus, np.stack([*writes, third]))
    costs = replace(costs, tables=early)
    for objective in (Objective(), Objective("fewest_gpus", most_seconds=20.0)):
        goal = replace(objective, streams=STREAMS)
        every, found = exhaustive(costs, models, goal), pruned(costs, models, 4, goal)
        assert [score(answer, goal) for answer in found] == [score(answer, goal) for answer in every[:4]]


@each_case("seed", range(0, 200, 5))
def test_answers_are_what_they_say(seed: int) -> None:
    costs, models = uneven(seed)
    for found in pruned(costs, models, 100) + exhaustive(costs, models):
        assert sorted(model for some, _, _ in found.sets for model in some) == list(models)
        for group, most in enumerate(costs.groups):
            assert sum(gpus for _, of, gpus in found.sets if of == group) <= most
        assert not costs.one_host or len({group for _, group, _ in found.sets}) == 1
        tables = [(costs.of(some, group), gpus) for some, group, gpus in found.sets]
        stages = np.max([table.seconds[:, table.gpus == gpus][:, 0] for table, gpus in tables], 0)
        assert found.stages == tuple(stages.tolist())
        assert found.seconds == sum(found.stages) < np.inf
        assert found.gpus == sum(gpus for _, _, gpus in found.sets)


@each_case("seed", range(0, 200, 8))
def test_the_order_of_the_input_does_not_matter(seed: int) -> None:
    costs, models = uneven(seed)
    assert pruned(costs, models) == pruned(costs, models[::-1])
    assert exhaustive(costs, models) == exhaustive(costs, models[::-1])


def test_more_gpus_never_predict_a_worse_optimum() -> None:
    models = MODELS[:4]
    best = [pruned(falling([most]), models)[0].seconds for most in range(8, 65, 4)]
    assert best == sorted(best, reverse=True)
    assert best[0] > 2 * best[-1]
    assert pruned(falling([32, 8]), models)[0].seconds <= pruned(falling([32]), models)[0].seconds


def flat(groups: Sequence[int], least: Mapping[frozenset[str], int] | None = None) -> Tables:
    """Everything takes a second, with any number of GPUs from the least one on."""
    tables = {}
    for some in subsets(("actor", "critic")):
        for group, most in enumerate(groups):
            gpus = np.arange((least or {}).get(some, 1), most + 1)
            tables[some, group] = StageTable(gpus, np.ones((3, len(gpus))))
    return Tables(groups, tables)


@pytest.mark.parametrize("search", [exhaustive, pruned])
def test_ties_go_to_fewer_gpus_and_then_to_fewer_sets(search: Search) -> None:
    both = frozenset({"actor", "critic"})
    apart = [(frozenset({"actor"}), 0, 1), (frozenset({"critic"}), 0, 1)]
    together = [[*found.sets] for found in search(flat([8]), both)]
    assert together == [[(both, 0, 1)], apart]
    equal = [[*found.sets] for found in search(flat([8], {both: 2}), both)]
    assert equal == [[(both, 0, 2)], apart]
    fewer = [[*found.sets] for found in search(flat([8], {both: 3}), both)]
    assert fewer == [apart, [(both, 0, 3)]]


def test_a_tie_with_the_last_kept_goes_to_the_earlier() -> None:
    both = frozenset({"actor", "critic"})
    seconds = np.array([[2.0, 1.0]] * 3)
    costs = Tables([8], {**flat([8]).tables, (both, 0): StageTable(np.array([1, 4]), seconds)})
    (found,) = pruned(costs, both, 1, Objective("lowest_cost", prices=(0,)))
    assert found.sets == ((both, 0, 4),)


@pytest.mark.parametrize("search", [exhaustive, pruned])
def test_nothing_fits(search: Search) -> None:
    both = frozenset({"actor", "critic"})
    assert search(flat([]), both) == []
    assert search(flat([8], dict.fromkeys(subsets(tuple(both)), 9)), both) == []
    assert [found.gpus for found in search(flat([8], {frozenset({"actor"}): 8}), both)] == [1]
    assert search(flat([8]), both, objective=Objective("fewest_gpus", most_seconds=2.9)) == []
    assert search(flat([8]), ()) == []


@pytest.mark.parametrize("search", [exhaustive, pruned])
def test_objectives_choose_what_they_are_named_for(search: Search) -> None:
    actor = frozenset({"actor"})
    slow = StageTable(np.array([1, 2, 4]), np.array([[8.0, 5, 4]] * 3))
    fast = StageTable(np.array([1, 2, 4]), np.array([[6.0, 3, 2]] * 3))
    costs = Tables([4, 4], {(actor, 0): slow, (actor, 1): fast})

    def choice(objective: Objective) -> tuple[int, int]:
        ((_, group, gpus),) = search(costs, actor, objective=objective)[0].sets
        return group, gpus

    assert choice(Objective()) == (1, 4)
    assert choice(Objective("fewest_gpus", most_seconds=24)) == (1, 1)
    assert choice(Objective("fewest_gpus", most_seconds=17)) == (1, 2)
    assert choice(Objective("fewest_gpus", most_seconds=6)) == (1, 4)
    assert choice(Objective("lowest_cost", prices=(1, 1))) == (1, 2)
    assert choice(Objective("lowest_cost", prices=(1, 3))) == (0, 1)
    assert choice(Objective("lowest_cost", prices=(1, 0))) == (1, 4)


def test_a_generator_of_its_own_is_with_no_other() -> None:
    found = placements(("actor", "reward", "rollout"))
    assert [sorted(map(sorted, each)) for each in found] == [
        [["actor", "reward"], ["rollout"]],
        [["actor"], ["reward"], ["rollout"]],
    ]
