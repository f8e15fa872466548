"""What the models of each algorithm do in a step, by hand, and that each job can be mapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.algorithms import ActorCritic, PolicyGradient
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.auto_map import auto_map, predict, task_of
from rlhf_mapper.mapping import DeviceMapping, Infeasible, MappedPool
from rlhf_mapper.place import place
from rlhf_mapper.workload import lognormal, workload_of
from rlhf_planning.timeline import timeline_of
from rlhf_trainer.run.graph import graph_of
from tests.each import each_case
from tests.mapper.planned_jobs import cluster_of, job_of, shapes_of

PTX = {"options": {"pretrainCoefficient": 0.5}, "data": {"pretrain": {"uri": "hf://org/text"}}}
MINI = {"miniBatchSize": 16}
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("SFT", {}),
    "RewardModel": ("RewardModel", {}),
    "CostModel": ("CostModel", {}),
    "DPO": ("DPO", {}),
    "SimPO": ("SimPO", {}),
    "ORPO": ("ORPO", {}),
    "KTO": ("KTO", {}),
    "OnlineDPO": ("OnlineDPO", {"rollout": {"samplesPerPrompt": 2}, "training": {"miniBatchSize": 32}}),
    "PPO": ("PPO", {"training": MINI | {"updateEpochs": 2}}),
    "PPO-ptx": ("PPO", PTX | {"training": MINI}),
    "ReMax": ("ReMax", {}),
    "SafeRLHF": ("SafeRLHF", {"training": MINI}),
    "VAPO": ("VAPO", {"rollout": {"samplesPerPrompt": 4}, "training": MINI}),
    "SafeRLHF, one critic": ("SafeRLHF", {"options": {"separateCostCritic": False}, "training": MINI}),
    "GRPO": ("GRPO", {"options": {"oversampling": 2}, "rollout": {"samplesPerPrompt": 4}, "training": MINI}),
    "RLOO": ("RLOO", {"rollout": {"samplesPerPrompt": 4}}),
    "REINFORCEPP": ("REINFORCEPP", {"training": MINI}),
    "Generate": ("Generate", {}),
}
CRITIC_FREE = [
    name for name, each in ALGORITHMS.items() if issubclass(each, PolicyGradient) and not issubclass(each, ActorCritic)
]
JOBS |= {name: (name, {"rollout": {"samplesPerPrompt": 4}}) for name in CRITIC_FREE if name not in JOBS}
Row = tuple[int, int, int, int, int]
"""Sequences generated, generation passes, sequences read, sequences trained on, optimizer steps."""
WORK: dict[str, dict[str, Row]] = {
    "SFT": {"actor": (0, 0, 0, 64, 1)},
    "RewardModel": {"reward": (0, 0, 0, 128, 1)},
    "CostModel": {"cost": (0, 0, 0, 128, 1)},
    "DPO": {"actor": (0, 0, 0, 128, 1), "reference": (0, 0, 128, 0, 0)},
    "SimPO": {"actor": (0, 0, 0, 128, 1)},
    "ORPO": {"actor": (0, 0, 0, 128, 1)},
    "KTO": {"actor": (0, 0, 64, 64, 1), "reference": (0, 0, 128, 0, 0)},
    "PPO": {
        "actor": (64, 1, 64, 128, 8),
        "critic": (0, 0, 64, 128, 8),
        "reference": (0, 0, 64, 0, 0),
        "reward": (0, 0, 64, 0, 0),
    },
    "PPO-ptx": {
        "actor": (64, 1, 128, 128, 4),
        "critic": (0, 0, 64, 64, 4),
        "reference": (0, 0, 64, 0, 0),
        "reward": (0, 0, 64, 0, 0),
    },
    "ReMax": {"actor": (128, 2, 64, 64, 1), "reference": (0, 0, 64, 0, 0), "reward": (0, 0, 128, 0, 0)},
    "SafeRLHF": {
        "actor": (64, 1, 64, 64, 4),
        "critic": (0, 0, 64, 64, 4),
        "cost_critic": (0, 0, 64, 64, 4),
        "reference": (0, 0, 64, 0, 0),
        "reward": (0, 0, 64, 0, 0),
        "cost": (0, 0, 64, 0, 0),
    },
    "VAPO": {"actor": (256, 1, 256, 256, 16), "critic": (0, 0, 256, 256, 16), "reward": (0, 0, 256, 0, 0)},
    "GRPO": {"actor": (512, 1, 512, 256, 16), "reference": (0, 0, 512, 0, 0), "reward": (0, 0, 512, 0, 0)},
    "RLOO": {"actor": (256, 1, 256, 256, 1), "reference": (0, 0, 256, 0, 0), "reward": (0, 0, 256, 0, 0)},
    "REINFORCEPP": {"actor": (64, 1, 64, 64, 4), "reference": (0, 0, 64, 0, 0), "reward": (0, 0, 64, 0, 0)},
    "Generate": {"actor": (64, 1, 0, 0, 0), "reward": (0, 0, 64, 0, 0)},
}
VARIANTS = {"PPO-ptx", "SafeRLHF, one critic"}
WORK["SafeRLHF, one critic"] = {role: row for role, row in WORK["SafeRLHF"].items() if role != "cost_critic"}


def job(name: str) -> Job:
    algorithm, changes = JOBS[name]
    return job_of(algorithm, **changes)


def rows(name: str) -> dict[str, Row]:
    return rows_of(job(name))


def rows_of(one: Job) -> dict[str, Row]:
    work = workload_of(one).work
    return {
        role: (int(one.generated), one.passes, int(one.read), int(one.trained), one.updates)
        for role, one in work.items()
    }


@each_case("name", WORK)
def test_sequences_and_updates_are_those_of_the_algorithm(name: str) -> None:
    assert rows(name) == WORK[name]


def of_the_graph(one: Job) -> dict[str, Row]:
    """The same from the calls that the trainer makes and the phases its workers declare; without mini-batches."""
    pool = MappedPool(name="all", models=tuple(one.models()), slots_per_machine=(1,))
    sizes = {role: ParallelSizes(data=1) for role in one.models()}
    graph = graph_of(one, DeviceMapping(device="CPU", pools=(pool,), sizes=sizes))
    found: dict[str, Row] = {}
    for role in one.models():
        calls = [call for call in graph.calls if call.name.startswith(f"{role}.")]
        passes = sum(call.name.endswith(".generate_sequences") for call in calls)
        read, updates = (sum(call.phase == phase for call in calls) for phase in ("scoring", "update"))
        found[role] = (passes * graph.rows, passes, read * graph.rows, updates * graph.rows, updates)
    return found


@each_case("name", ["KTO", *CRITIC_FREE])
def test_without_a_critic_the_work_is_the_trainers_calls(name: str) -> None:
    has_groups = ALGORITHMS[name].comparing == {} or name == "Distillation"
    samples = {"rollout": {"samplesPerPrompt": 4}} if has_groups else {}
    one = job_of(name, **samples)
    assert rows_of(one) == of_the_graph(one)


def test_every_algorithm_is_expected_here() -> None:
    """Who adds one without a critic need not write down what its models do."""
    assert ALGORITHMS.keys() == WORK.keys() - VARIANTS | {"OnlineDPO", "Merge"} | set(CRITIC_FREE)


def test_online_dpo_learns_from_the_best_and_the_worst() -> None:
    actor = rows("OnlineDPO")["actor"]
    assert (actor[0], actor[1], actor[3], actor[4]) == (128, 1, 128, 4)


@each_case("name", JOBS)
def test_it_can_be_mapped_and_every_phase_takes_time(name: str) -> None:
    one = job(name)
    mapping = auto_map(one, cluster_of(("h100-80g", 2, 8)), shapes_of(one), device="GPU")
    assert isinstance(mapping, DeviceMapping)
    assert mapping.prediction
    assert mapping.sizes.keys() == one.models().keys()
    work = workload_of(one).work
    for role, model in mapping.prediction.models.items():
        assert ("generation" in model.seconds) == bool(work[role].generated)
        assert ("scoring" in model.seconds) == bool(work[role].read)
        assert ("update" in model.seconds) == bool(work[role].trained)
    assert mapping.prediction.step_seconds == pytest.approx(sum(mapping.prediction.stages.values()))


def test_a_step_without_mini_batches_is_one_update() -> None:
    whole = workload_of(job_of("PPO")).work["actor"]
    assert (whole.trained, whole.updates) == (64, 1)


def test_lengths_seen_before_replace_the_longest() -> None:
    load = workload_of(job("PPO"), responses=[100, 300])
    assert (load.response.mean, load.response.longest, load.tokens / load.sequences) == (200, 300, 1224)
    assert load.tokens == 64 * 1224
    assert workload_of(job("PPO")).most_tokens == 2048


def test_pools_divide_the_batch_and_its_mini_batches() -> None:
    assert workload_of(job("PPO")).pool_divides == (64, 16)
    assert workload_of(job("GRPO")).pool_divides == (512, 16)
    assert workload_of(job("SFT")).pool_divides == (64,)
    assert workload_of(job("OnlineDPO")).pool_divides == (128, 32, 64), "a rank has all responses to a prompt"


def test_recomputation_is_that_of_the_manifest() -> None:
    models = {"actor": {"gradientCheckpointing": True}}
    work = workload_of(job_of("PPO", models=models)).work
    found = [work[role].recomputes for role in ("actor", "critic", "reference")]
    assert found == [True, None, False], "None: as it fits best"


TOGETHER = {
    "GRPO": {"actor": (4, 1), "reference": (4, 4), "reward": (4, 4)},
    "RLOO": {"actor": (4, 4), "reference": (4, 4), "reward": (4, 4)},
    "PPO": dict.fromkeys(("actor", "critic", "reference", "reward"), (1, 1)),
    "PPO-ptx": dict.fromkeys(("actor", "critic", "reference", "reward"), (1, 1)),
    "DPO": {"actor": (1, 2), "reference": (1, 1)},
    "RewardModel": {"reward": (1, 2)},
    "OnlineDPO": dict.fromkeys(("actor", "reference", "reward"), (2, 2)),
}


@each_case("name", TOGETHER)
def test_sequences_that_have_one_prompt_compute_it_once(name: str) -> None:
    """GRPO's 16 mini-batches have one response to a prompt each."""
    work = workload_of(job(name)).work
    assert {role: (each.read_together, each.trained_together) for role, each in work.items()} == TOGETHER[name]


TOGETHER_AND_APART: dict[str, list[tuple[Role, ...]]] = {
    "together": [("actor", "critic", "reference", "reward", "cost", "cost_critic")],
    "apart": [("actor", "reference", "reward"), ("critic", "cost", "cost_critic")],
}


@pytest.mark.parametrize(
    ("places", "epochs", "reads"), [("together", 1, False), ("together", 2, True), ("apart", 1, True)]
)
def test_a_critic_beside_the_actor_finds_values_in_its_update(places: str, epochs: int, reads: bool) -> None:
    one = job_of("SafeRLHF", training={"updateEpochs": epochs})
    pools = tuple(
        MappedPool(name=models[0], models=models, slots_per_machine=(8,)) for models in TOGETHER_AND_APART[places]
    )
    sizes = {role: ParallelSizes(data=8) for role in one.models()}
    mapping = DeviceMapping(device="GPU", pools=pools, sizes=sizes)
    found = predict(one, mapping, cluster_of(("h100-80g", 2, 8)), shapes_of(one))
    assert isinstance(found, DeviceMapping)
    assert found.prediction
    for critic in ("critic", "cost_critic"):
        assert ("scoring" in found.prediction.models[critic].seconds) == reads
        assert "update" in found.prediction.models[critic].seconds


def test_generators_with_drafts_have_no_pipeline_stages() -> None:
    drafted = {"speculation": {"method": "NGram"}}
    plain, drafts = (job_of("GRPO", rollout={"samplesPerPrompt": 2, **more}) for more in ({}, drafted))
    found = [task_of(each, shapes_of(each), device="GPU").requests["actor"] for each in (plain, drafts)]
    assert [each.generation_pipeline for each in found] == [None, 1]


def test_a_pool_that_generates_takes_that_from_the_actor() -> None:
    pools = [
        {"name": "train", "models": ["actor", "critic", "reference", "reward"], "slotsPerNode": 8},
        {"name": "writers", "models": ["rollout"], "nodes": 2, "slotsPerNode": 4},
    ]
    placement = {"mode": "Manual", "pools": pools}
    job = job_of("PPO", placement=placement, rollout={"tensorParallel": 4})
    mapping = place(job, (8, 8, 8))
    assert mapping.sizes["rollout"] == ParallelSizes(data=2, tensor=4)
    found = predict(job, mapping, cluster_of(("h100-80g", 3, 8)), shapes_of(job))
    assert isinstance(found, DeviceMapping)
    assert found.prediction
    actor, rollout = (found.prediction.models[role] for role in ("actor", "rollout"))
    assert set(actor.seconds) == {"scoring", "update"}
    assert set(rollout.seconds) == {"generation", "reshard"}
    assert set(rollout.memory["generation"]) == {"weights", "generator", "kv_cache"}
    assert rollout.memory["generation"]["weights"] == 0
    assert found.prediction.phases["generation"] == rollout.seconds["generation"]
    stale = job_of("PPO", placement=placement, rollout={"tensorParallel": 4, "maxStaleness": 1})
    ahead = predict(stale, mapping, cluster_of(("h100-80g", 3, 8)), shapes_of(stale))
    assert isinstance(ahead, DeviceMapping)
    assert ahead.prediction
    generation, *others = found.prediction.stages.values()
    sent = rollout.seconds["reshard"]
    assert ahead.prediction.step_seconds == pytest.approx(max(generation, sum(others) + sent))
    assert found.prediction.step_seconds == pytest.approx(generation + sum(others))
    timeline = timeline_of(ahead.pools, ahead.prediction)
    assert timeline.seconds == pytest.approx(ahead.prediction.step_seconds)
    assert min(bar.start for bar in timeline.bars if bar.pool == "writers") == 0
    assert min(bar.start for bar in timeline.bars if bar.pool == "train") == pytest.approx(sent), "it sends weights"


@pytest.mark.parametrize("gpus", [4, 8, 16])
def test_the_mapper_gives_what_works_ahead_a_pool_of_its_own(gpus: int) -> None:
    job = job_of("PPO", rollout={"maxStaleness": 1})
    cluster = cluster_of(("h100-80g", max(gpus // 8, 1), min(gpus, 8)))
    found = auto_map(job, cluster, shapes_of(job), device="GPU")
    assert isinstance(found, DeviceMapping)
    assert found.prediction
    (writers,) = (pool for pool in found.pools if "rollout" in pool.models)
    assert writers.models == ("rollout",)
    assert found.sizes["rollout"].world_size == writers.size
    assert found.sizes["rollout"].micro == 1
    generation, *others = found.prediction.stages.values()
    sent = found.prediction.phases["reshard"]
    assert found.prediction.step_seconds == pytest.approx(max(generation, sum(others) + sent))
    assert all(found.prediction.step_seconds <= other.step_seconds for other in found.rejected)
    again = predict(job, found, cluster, shapes_of(job))
    assert isinstance(again, DeviceMapping)
    assert again.prediction
    assert again.prediction.step_seconds == pytest.approx(found.prediction.step_seconds)


def test_one_gpu_cannot_generate_and_train_at_a_time() -> None:
    job = job_of("PPO", rollout={"maxStaleness": 1})
    assert isinstance(auto_map(job, cluster_of(("h100-80g", 1, 1)), shapes_of(job), device="GPU"), Infeasible)


def test_generation_elsewhere_takes_no_slot_and_no_time() -> None:
    job = job_of("PPO", rollout={"endpoints": ["http://a:8000"], "maxStaleness": 1, "stream": True})
    found = auto_map(job, cluster_of(("h100-80g", 1, 8)), shapes_of(job), device="GPU")
    assert isinstance(found, DeviceMapping)
    assert {role for pool in found.pools for role in pool.models} == {"actor", "critic", "reference", "reward"}
    assert found.prediction
    assert set(found.prediction.phases) == {"scoring", "update"}
    assert not {"generator", "kv_cache"} & {
        part for use in found.prediction.models["actor"].memory.values() for part in use
    }
    assert timeline_of(found.pools, found.prediction).seconds == pytest.approx(found.prediction.step_seconds)


def test_what_streams_is_scored_beside_the_longest_responses() -> None:
    """The prediction says what that saves, and the timeline shows where."""
    pools = [
        {"name": "writes", "models": ["actor"], "slotsPerNode": 8},
        {"name": "scores", "models": ["critic", "reference", "reward"], "slotsPerNode": 8},
    ]
    seconds = {}
    for stream in (False, True):
        job = job_of("PPO", placement={"mode": "Manual", "pools": pools}, rollout={"stream": stream})
        responses = lognormal(100, 1000, most=job.spec.data.max_response_tokens)
        found = predict(job, place(job, (8, 8)), cluster_of(("h100-80g", 2, 8)), shapes_of(job), responses=responses)
        assert isinstance(found, DeviceMapping)
        assert found.prediction
        seconds[stream] = found.prediction.step_seconds
        timeline = timeline_of(found.pools, found.prediction)
        assert timeline.seconds == pytest.approx(found.prediction.step_seconds)
        begins = min(bar.start for bar in timeline.bars if bar.pool == "scores")
        assert (begins < found.prediction.stages["generation"] * 0.999) == stream
        scored = sum(found.prediction.models[role].seconds["scoring"] for role in found.pools[1].models)
        assert found.prediction.phases["scoring"] == pytest.approx(scored, rel=0.2)
    assert seconds[True] < seconds[False]


def placed_well(found: DeviceMapping | Infeasible) -> tuple[DeviceMapping, float]:
    """A plan and the seconds of its step."""
    assert isinstance(found, DeviceMapping)
    assert found.prediction
    return found, found.prediction.step_seconds


def test_streaming_is_searched() -> None:
    """The placement that is found without streaming is slower with it than the one that is searched with it."""
    cluster, lengths = cluster_of(("h100-80g", 1, 8), ("a100-80g", 1, 8)), lognormal(800, 8000, most=8192)
    same: dict[str, Any] = {
        "training": {"promptBatchSize": 256},
        "data": {"maxPromptTokens": 2048, "maxResponseTokens": 8192},
    }
    late, early = (job_of("PPO", rollout={"stream": mode}, **same) for mode in (False, True))
    shapes = shapes_of(early)
    barriers, _ = placed_well(auto_map(late, cluster, shapes, device="GPU", responses=lengths))
    best, seconds = placed_well(auto_map(early, cluster, shapes, device="GPU", responses=lengths))
    assert placed_well(predict(early, best, cluster, shapes, responses=lengths))[1] == pytest.approx(seconds)
    assert seconds < 0.95 * placed_well(predict(early, barriers, cluster, shapes, responses=lengths))[1]


def test_without_shared_prompts_each_sequence_computes_its_own() -> None:
    algorithm, changes = JOBS["RLOO"]
    work = workload_of(job_of(algorithm, **changes, training={"sharePrompts": False})).work
    assert {(each.read_together, each.trained_together) for each in work.values()} == {(1, 1)}


def test_a_rollout_gets_weights_whatever_the_reward_is() -> None:
    example = Path(__file__).parents[2] / "examples" / "12-arithmetic-grpo.yaml"
    job = load(example, ["arithmetic-grpo:rollout.maxStaleness=1", "resources.slotsPerNode=null"])[-1]
    assert "reward" not in job.models(), "it is a function"
    assert not workload_of(job).work["rollout"].keeps_generator
