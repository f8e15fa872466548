"""Every pool of every job has the workers, arguments and marks that its step needs: a table that starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_mapper.place import place
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.run.graph import graph_of
from rlhf_trainer.run.worker_specs import worker_specs
from rlhf_trainer.telemetry import ENDPOINTS
from rlhf_trainer.types import PARENTS
from rlhf_trainer.workers.actor import ActorWorker
from rlhf_trainer.workers.data import DataShape
from rlhf_trainer.workers.generating_actor import GeneratingActor, GeneratorWorker
from rlhf_trainer.workers.rollout import RolloutWorker
from rlhf_trainer.workers.samples import COLUMNS, EPISODES, RAW_PROMPTS, TURN_FIELDS
from tests.each import each_case
from tests.examples.test_every_example_is_right import DISTINCT, EXAMPLES, FINISHED, jobs_of

ALL = [job for path in DISTINCT for job in jobs_of(path)]
SHAPE = DataShape(rows=640, total_steps=7, evaluation_rows=10, facts=())
FOLDERS: dict[Role, str] = dict.fromkeys(get_args(Role), "model")
TRAINS = "{name: trains, models: [actor, reference, reward], slotsPerNode: 2}"
APART = f"placement={{mode: Manual, pools: [{TRAINS}, {{name: writes, models: [rollout], slotsPerNode: 1}}]}}"
ELSEWHERE = 'rollout.endpoints=["http://127.0.0.1:8000"]'
FUNCTION = "models.reward={entrypoint: 'somewhere:score'}"
TURNS = "rollout.environment={entrypoint: 'somewhere:Game'}"
SWITCHES = {
    "in the actor's pool": ((), {}),
    "apart": ((APART,), {"pool": "writes"}),
    "stale": ((APART, "rollout.maxStaleness=1"), {"pool": "writes"}),
    "partial": ((APART, "rollout.maxStaleness=1", "rollout.partial=Continue"), {"pool": "writes"}),
    "delta": ((APART, "rollout.weightSync=Delta"), {"pool": "writes"}),
    "stream": ((APART, "rollout.stream=true"), {"pool": "writes"}),
    "endpoints": ((ELSEWHERE,), {"pool": ENDPOINTS}),
}


def specs_of(job: Job, retokenized: Sequence[Role] = ()) -> dict[str, dict[str, WorkerSpec]]:
    return worker_specs(job, place(job, (0,)), FOLDERS, SHAPE, path=Path("run/job"), retokenized=retokenized)


def grpo(*overrides: str) -> Job:
    path = next(path for path in EXAMPLES if path.name.startswith("02-"))
    return next(job for job in load(path, overrides, FINISHED) if job.name == "helpful-grpo")


@each_case("job", ALL, ids=[job.name for job in ALL])
def test_every_call_of_a_step_has_a_worker(job: Job) -> None:
    specs = {role: spec for workers in specs_of(job).values() for role, spec in workers.items()}
    calls = [call.name.split(".") for call in graph_of(job, place(job, (0,))).calls]
    assert len(calls) > 1
    assert all(method in specs[role].transfers for role, method in calls)
    assert specs.keys() >= {*job.models(), "data"}
    assert ("judge" in specs) is not job.spec.algorithm.offline
    assert all(spec.arguments["setting"].total_steps for role, spec in specs.items() if role in job.trained())


@each_case("name", SWITCHES)
def test_the_generator_is_where_the_rollout_says(name: str) -> None:
    overrides, where = SWITCHES[name]
    specs = specs_of(grpo(*overrides))
    found = {pool: spec for pool, workers in specs.items() for role, spec in workers.items() if role == "rollout"}
    assert [*found] == [*where.values()]
    assert all(spec.worker_class is RolloutWorker for spec in found.values())
    (actor,) = (workers["actor"] for workers in specs.values() if "actor" in workers)
    assert actor.worker_class is ActorWorker


@pytest.mark.parametrize("overrides", [(), (APART,)], ids=["in place", "apart"])
def test_only_the_generator_plays_episodes(overrides: Sequence[str]) -> None:
    specs = {role: spec for workers in specs_of(grpo(TURNS, *overrides)).values() for role, spec in workers.items()}
    plays = {role for role in ("actor", "rollout") if role in specs and adds_turns(specs[role])}
    assert plays == ({"rollout"} if overrides else {"actor"})


@pytest.mark.parametrize("overrides", [(), (APART.replace(", reward", ""),)], ids=["in place", "apart"])
def test_an_agents_episodes_are_trees_of_the_files_rows(overrides: Sequence[str]) -> None:
    agent = "rollout.agent={command: [play]}"
    specs = {
        role: spec for workers in specs_of(grpo(FUNCTION, agent, *overrides)).values() for role, spec in workers.items()
    }
    mark = specs["rollout" if overrides else "actor"].transfers["generate_sequences"]
    assert set(mark.adds or ()) >= {*TURN_FIELDS, PARENTS, EPISODES}
    assert RAW_PROMPTS in mark.reads_if_there
    for call in ("load_batch", "load_evaluation"):
        assert RAW_PROMPTS in (specs["data"].transfers[call].adds or ())
    assert PARENTS in specs["reward"].transfers["compute_reward"].reads_if_there
    assert PARENTS in specs["judge"].transfers["judge"].reads_if_there


def adds_turns(spec: WorkerSpec) -> bool:
    mark = spec.transfers["generate_sequences"]
    assert mark.adds
    has = set(mark.adds) >= set(TURN_FIELDS)
    assert has is (set(mark.reads_if_there) >= set(COLUMNS))
    return has


def test_a_rank_generates_its_share_of_the_largest_batch() -> None:
    job = grpo()
    specs = specs_of(job)["main"] if "main" in specs_of(job) else next(iter(specs_of(job).values()))
    actor = specs["actor"]
    assert actor.layout
    share = -(-job.sequences_per_step // (actor.layout.data * actor.layout.micro))
    assert actor.arguments["max_sequences"] == share


@pytest.mark.parametrize(
    ("overrides", "reads", "adds"),
    [
        ((), {"tokens", "rollout_log_probs"}, ("old_log_probs",)),
        (("training.miniBatchSize=64",), {"policy_version"}, ()),
        (("training.oldLogProbs=Generator",), {"rollout_log_probs"}, ("old_log_probs",)),
    ],
    ids=["Pass", "Update", "Generator"],
)
def test_old_log_probabilities_come_from_one_place(
    overrides: Sequence[str], reads: set[str], adds: tuple[str, ...]
) -> None:
    (specs,) = specs_of(grpo(*overrides)).values()
    mark = specs["actor"].transfers["compute_log_prob"]
    assert set(mark.reads) >= reads
    assert ("tokens" in mark.reads) is (mark.phase == "scoring")
    assert mark.adds == adds


def test_a_model_with_its_own_tokenizer_reads_texts() -> None:
    (plain,), (other,) = (specs_of(grpo(), of).values() for of in ((), ("reward",)))
    assert "finished" not in plain["reward"].transfers["compute_reward"].reads
    assert "finished" in other["reward"].transfers["compute_reward"].reads
    assert other["reward"].arguments["setting"].actor == (grpo().models()["actor"], "model")
    assert other["actor"] == plain["actor"]


def test_kept_rollouts_have_a_keeper_and_the_parts_of_rewards() -> None:
    (specs,) = specs_of(grpo(FUNCTION, "rollout.keep=0.5")).values()
    assert specs["rollouts"].arguments["file"].endswith("run/job/rollouts.jsonl")
    assert "reward_parts" in (specs["reward"].transfers["compute_reward"].adds or ())


def test_an_own_actor_keeps_its_pass_of_log_probabilities() -> None:
    class Own(ActorWorker):
        pass

    job = grpo("training.oldLogProbs=Generator")
    algorithm: Any = type("OwnAlgorithm", (type(job.spec.algorithm),), {"workers": {"actor": Own}})
    own = algorithm.model_construct(**dict(job.spec.algorithm))
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"algorithm": own})})
    (specs,) = specs_of(job).values()
    assert specs["actor"].worker_class is Own
    assert specs["actor"].arguments.keys() == {"setting", "max_sequences"}
    assert issubclass(Own, GeneratingActor)


def test_a_job_that_makes_data_has_a_generator_and_a_writer() -> None:
    job = next(job for job in ALL if job.spec.algorithm.makes == "data")
    home = place(job, (0,)).pools[0].name
    specs = specs_of(job)[home]
    assert specs["actor"].worker_class is GeneratorWorker
    assert specs["responses"].arguments["folder"].endswith("run/job/data")


def test_specs_of_one_pool_do_not_depend_on_the_order_of_pools() -> None:
    job = grpo(APART)
    placed = place(job, (0,))
    turned = replace(placed, pools=placed.pools[::-1])
    one, other = (worker_specs(job, each, FOLDERS, SHAPE, path=Path("run/job")) for each in (placed, turned))
    assert one == other
