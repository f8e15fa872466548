"""All 15 partitions of PPO's models over pools and all 52 of SafeRLHF's: the same measurements over three steps.

Pools have two slots and one in turn, so sums are taken in another order: the tolerance is 1e-5 relative, 1e-6 absolute.
Real workers, batches of references and torch.distributed; light processes in Ray's place, a plain sampler in vLLM's.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_api.names import Role
from tests.examples.test_every_example_is_right import DISTINCT, FINISHED
from tests.trainer.measured import SHARED
from tests.trainer.placement.sweep import (
    ROLES,
    STEPS,
    Outcome,
    Partition,
    name_of,
    partitions,
    pools_of,
    run,
    small_job,
)
from tests.trainer.tiny import save_tiny

BY_PLACEMENT = (*SHARED, "bytes/", "sync_bytes/")
"""Measurements of where and when, not of what."""
ALWAYS = {"PPO": ("together",), "SafeRLHF": ()}
"""Partitions of each algorithm in `make test`; another test there has each model of PPO in a pool of its own."""
SHORT = {"totalSteps": 5, "promptBatchSize": 8, "callDeadlineSeconds": 60}
Runs = Callable[..., Outcome]


def cases() -> Iterator[object]:
    for algorithm, roles in ROLES.items():
        found = list(partitions(roles))
        ends = {"apart": found[0], "together": found[-1]}
        always = [ends[each] for each in ALWAYS[algorithm]]
        for partition in found:
            marks = () if partition in always else pytest.mark.slow
            yield pytest.param(algorithm, partition, id=f"{algorithm}: {name_of(partition)}", marks=marks)


@pytest.fixture(scope="module")
def runs(folders: Mapping[Role, str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """`runs(algorithm, partition, *slots)`; more is told to `small_job`."""

    def outcome(algorithm: str, partition: Partition, *slots: int, **more: Any) -> Outcome:
        folder = tmp_path_factory.mktemp("run")
        job = small_job(folder, algorithm, folders, pools_of(partition, slots=slots), **more)
        return run(folder, job, folders)

    return outcome


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Role, str]:
    """A tiny model for each role."""
    root = tmp_path_factory.mktemp("models")
    language = save_tiny(root / "language", seed=3)
    reward = save_tiny(root / "reward", seed=4, labels=1)
    cost = save_tiny(root / "cost", seed=5, labels=1)
    folders: dict[Role, str] = {"actor": language, "reference": language, "critic": reward, "reward": reward}
    return {**folders, "cost": cost, "cost_critic": cost}


@pytest.fixture(scope="module")
def placed(runs: Runs) -> Runs:
    """`placed(algorithm, partition)`: an outcome on pools of two slots and one in turn, made once."""
    made: dict[tuple[str, str], Outcome] = {}

    def outcome(algorithm: str, partition: Partition) -> Outcome:
        key = (algorithm, name_of(partition))
        if key not in made:
            made[key] = runs(algorithm, partition, 2, 1)
        return made[key]

    return outcome


@pytest.fixture(scope="module")
def together(runs: Runs) -> Callable[[str], Outcome]:
    """All models on one slot."""
    return cache(lambda algorithm: runs(algorithm, [ROLES[algorithm]], 1))


def measured(record: Mapping[str, float]) -> dict[str, float]:
    """What must not depend on the placement."""
    return {name: value for name, value in record.items() if not name.startswith(BY_PLACEMENT)}


def require_same(apart: Outcome, together: Outcome) -> None:
    for record, other in zip(apart.records, together.records, strict=True):
        assert measured(record) == pytest.approx(measured(other), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("algorithm", "partition"), list(cases()))
def test_a_partition_gives_the_losses_of_one_slot(
    algorithm: str, partition: Partition, placed: Runs, together: Callable[[str], Outcome]
) -> None:
    apart = placed(algorithm, partition)
    assert apart.processes == sum((2, 1)[number % 2] for number in range(len(partition)))
    one = together(algorithm)
    assert len(one.records) == STEPS
    assert {"loss/policy", "loss/value", "reward/mean", "kl/reference", "entropy"} <= one.records[0].keys()
    require_same(apart, one)


def test_there_are_as_many_partitions_as_there_should_be() -> None:
    found = {algorithm: [sorted(map(sorted, each)) for each in partitions(roles)] for algorithm, roles in ROLES.items()}
    assert {algorithm: len(each) for algorithm, each in found.items()} == {"PPO": 15, "SafeRLHF": 52}
    for algorithm, each in found.items():
        assert all(each.count(one) == 1 for one in each)
        assert all(sorted(role for group in one for role in group) == sorted(ROLES[algorithm]) for one in each)


@pytest.mark.parametrize("algorithm", ROLES)
def test_the_losses_change_with_what_is_learned(algorithm: str, together: Callable[[str], Outcome]) -> None:
    """Else the comparisons above would compare nothing."""
    first, *_, last = (measured(record) for record in together(algorithm).records)
    for name in ("loss/policy", "loss/value", "kl/reference", "entropy"):
        assert first[name] != pytest.approx(last[name], rel=1e-4), name


def require_same_bits(one: Outcome, other: Outcome) -> None:
    assert [measured(record) for record in one.records] == [measured(record) for record in other.records]
    assert all(one.weights[name].equal(weight) for name, weight in other.weights.items())


SPLIT = [["actor", "reward"], ["critic", "reference"]]


@pytest.mark.slow
def test_two_runs_give_the_same_bits(runs: Runs) -> None:
    require_same_bits(runs("PPO", SPLIT, 2, 1), runs("PPO", SPLIT, 2, 1))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [[ROLES["PPO"]], SPLIT], ids=name_of)
def test_offloaded_models_give_the_same_bits(groups: Partition, runs: Runs, placed: Runs) -> None:
    """Every model leaves its device; generation, updates and the saved model are what they were."""
    kept, offloaded = placed("PPO", groups), runs("PPO", groups, 2, 1, offload=True)
    require_same_bits(offloaded, kept)
    for role in ROLES["PPO"]:
        assert all(record[f"idle_bytes/{role}"] > 0 for record in kept.records)
        assert all(record[f"idle_bytes/{role}"] == 0 for record in offloaded.records)


def test_pools_of_one_slot_give_the_bits_of_one_pool(runs: Runs, together: Callable[[str], Outcome]) -> None:
    """Where no sum is taken in another order, nothing differs at all."""
    require_same_bits(runs("PPO", [[role] for role in ROLES["PPO"]], 1), together("PPO"))


ONE_EPOCH = {
    "algorithm": {
        "name": "PPO",
        "kl": {"coefficient": 0.1, "controller": "Adaptive", "target": 1.0},
        "entropyCoefficient": 0.01,
    },
    "data": {
        "train": {"uri": "package://rlhf_examples/helpful/train.jsonl", "limit": 19},
        "maxPromptTokens": 16,
        "maxResponseTokens": 6,
    },
    "training": {"totalEpochs": 1, "promptBatchSize": 16, "miniBatchSize": 2, "updateEpochs": 2},
    "rollout": {"samplesPerPrompt": 2},
}
"""Two steps; the second has three prompts: fewer rows than there are mini-batches, and padding on some slots."""


@pytest.mark.slow
def test_padding_rows_of_a_short_last_batch_count_for_nothing(runs: Runs) -> None:
    apart, together = (
        runs("PPO", partition, *slots, changes=ONE_EPOCH)
        for partition, slots in ((SPLIT, (2, 1)), ([ROLES["PPO"]], (1,)))
    )
    require_same(apart, together)
    full, short = apart.records
    assert full["kl/coefficient"] != short["kl/coefficient"], "Adaptive moved it"


LENGTH = ("training.totalSteps=2", "training.totalEpochs=")
SMALL = ("data.train.limit=40", *LENGTH, "training.callDeadlineSeconds=360", "evaluation=")
PLACED = [path for path in DISTINCT if path.stem != "23-merge"]
JOBS = [(path, job.name) for path in PLACED for job in load(path, SMALL, FINISHED) if len(job.models()) > 1]


def pools_in_turn(job: Job, groups: Partition) -> str:
    """The override that puts groups of a job's models on pools of two slots and one."""
    pools = json.dumps(pools_of(groups, slots=(2, 1)))
    return f"{job.name}:placement={{mode: Manual, pools: {pools}}}"


@pytest.mark.slow
@pytest.mark.parametrize(("path", "name"), JOBS, ids=[name for _, name in JOBS])
def test_every_algorithm_runs_split_and_standalone(
    path: Path, name: str, folders: Mapping[Role, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The examples' jobs: all models on one pool; the trained ones and the frozen ones; each by itself."""

    def outcome(groups: Partition) -> Outcome:
        placement = pools_in_turn(one, groups)
        placed = next(job for job in load(path, [*SMALL, placement], FINISHED) if job.name == name)
        return run(tmp_path_factory.mktemp("run"), placed, folders)

    one = next(job for job in load(path, SMALL, FINISHED) if job.name == name)
    roles = [role for role in one.models() if role != "cost_critic"]
    trained = [role for role in roles if role in one.trained()]
    together = outcome([roles])
    for groups in ([trained, [role for role in roles if role not in trained]], [[role] for role in roles]):
        require_same(outcome(groups), together)


@pytest.mark.parametrize(
    "slots", [*(pytest.param(slots, marks=pytest.mark.slow) for slots in ((1, 1), (2, 1))), (1, 2)], ids=str
)
def test_generation_in_a_pool_of_its_own_gives_the_same_losses(
    slots: tuple[int, ...], runs: Runs, together: Callable[[str], Outcome]
) -> None:
    apart = runs("PPO", [ROLES["PPO"], ["rollout"]], *slots)
    assert apart.processes == sum(slots)
    require_same(apart, together("PPO"))


@pytest.mark.parametrize("staleness", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_responses_are_as_stale_as_they_may_be_and_no_more(staleness: int, runs: Runs) -> None:
    """Whole batches are generated ahead, so each step learns from the oldest that are allowed."""
    changes = {
        "rollout": {"maxStaleness": staleness},
        "training": SHORT,
    }
    records = runs("PPO", [ROLES["PPO"], ["rollout"]], 2, 1, changes=changes).records
    assert [record["staleness"] for record in records] == [min(number, staleness) for number in range(5)]
    for number, record in enumerate(records):
        assert record[f"staleness_rows/{min(number, staleness)}"] == 8
        assert 0 <= record["queue/batches"] <= min(staleness, len(records) - 1 - number)
        assert 0 <= record["corrected_fraction"] < 0.2
        assert record["response_length/mean"] > 0


@pytest.mark.slow
def test_weights_that_changed_give_the_same_bits_as_all_weights(runs: Runs) -> None:
    """In bfloat16 and with a small learning rate most do not change, and few bytes are sent."""
    changes = {"rollout": {"weightSync": "Full"}, "training": {**SHORT, "precision": "BF16"}}
    full = runs("PPO", [ROLES["PPO"], ["rollout"]], 2, 1, changes=changes)
    delta = runs("PPO", [ROLES["PPO"], ["rollout"]], 2, 1, changes={**changes, "rollout": {"weightSync": "Delta"}})
    require_same_bits(delta, full)
    assert delta.records[0]["bytes/reshard"] >= full.records[0]["bytes/reshard"]
    assert delta.records[-1]["bytes/reshard"] < full.records[-1]["bytes/reshard"]
    kinds = [[name for name in record if name.startswith("sync_")] for record in (*delta.records, *full.records)]
    assert [sorted(each) for each in kinds] == [
        [f"sync_bytes/{kind}", f"sync_seconds/{kind}"]
        for kind in ("full", *["delta"] * (len(delta.records) - 1), *["full"] * len(full.records))
    ]


STREAMED = {"rollout": {"stream": True}}


@pytest.mark.parametrize(
    ("partition", "slots"),
    [
        pytest.param([["actor", "reward"], ["critic", "reference"]], (1, 2), marks=pytest.mark.slow),
        pytest.param([ROLES["PPO"], ["rollout"]], (2, 1), marks=pytest.mark.slow),
        ([["actor"], ["critic", "reference", "reward"]], (1, 1)),
        pytest.param([["actor"], ["critic"], ["reference", "reward"]], (2, 1), marks=pytest.mark.slow),
    ],
    ids=lambda each: name_of(each) if isinstance(each, list) else str(each),
)
def test_rows_that_are_scored_as_they_end_give_the_same_losses(
    partition: Partition, slots: tuple[int, ...], runs: Runs, together: Callable[[str], Outcome]
) -> None:
    require_same(runs("PPO", partition, *slots, changes=STREAMED), together("PPO"))


@pytest.mark.slow
def test_stale_rows_are_scored_in_groups_too(runs: Runs) -> None:
    whole, streamed = (
        runs("PPO", [ROLES["PPO"], ["rollout"]], 1, changes={"rollout": rollout, "training": SHORT})
        for rollout in ({"maxStaleness": 1}, {"maxStaleness": 1, "stream": True})
    )
    for record, other in zip(streamed.records, whole.records, strict=True):
        assert measured(record) == pytest.approx(measured(other), rel=1e-5, abs=1e-6)
