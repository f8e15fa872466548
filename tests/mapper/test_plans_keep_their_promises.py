"""What holds of every plan, on jobs, shapes and clusters drawn from seeds."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.auto_map import auto_map, mapping_of, task_of
from rlhf_mapper.hardware import GB, GPUS, Cluster, NodeGroup
from rlhf_mapper.mapping import PHASES, STAGE_OF, STAGES, DeviceMapping, Infeasible, MappedPool, Prediction
from rlhf_mapper.pools import PoolCosts
from rlhf_mapper.search.objective import Objective
from rlhf_mapper.search.pruned import pruned
from tests.api.cases import made
from tests.each import each_case
from tests.mapper.oracles import held
from tests.mapper.oracles.exhaustive import exhaustive
from tests.mapper.oracles.testbed import MODELS
from tests.mapper.planned_jobs import cluster_of, drawn, job_of, shapes_of

TOLERANCE = 1e-9
SEEDS = (6, 7, 20, 8, 16, 0, 2, 5, 9, 11, 13, 17, 34)
"""Jobs of all kinds that are mapped quickly; the others of MORE_SEEDS are slow tests."""
MORE_SEEDS = 40


def each_seed(examples: int = len(SEEDS)) -> pytest.MarkDecorator:
    """Run a test with some seeds, and as a slow test with all others. All tests share the plans, each made once."""
    rest = [seed for seed in range(MORE_SEEDS) if seed not in SEEDS[:examples]]
    return pytest.mark.parametrize(
        "seed", [*SEEDS[:examples], *(pytest.param(seed, marks=pytest.mark.slow) for seed in rest)]
    )


@cache
def plan(seed: int) -> DeviceMapping | Infeasible:
    job, cluster, shapes = drawn(seed)
    return auto_map(job, cluster, shapes, device="GPU")


def planned(seed: int) -> tuple[Job, Cluster, DeviceMapping, Prediction]:
    """A job, what there is, and the plan for it."""
    job, cluster, _ = drawn(seed)
    mapping = plan(seed)
    assert isinstance(mapping, DeviceMapping)
    assert mapping.prediction
    return job, cluster, mapping, mapping.prediction


def test_these_jobs_are_mapped_in_many_ways() -> None:
    fits = [found for found in map(plan, SEEDS) if isinstance(found, DeviceMapping)]
    assert len(fits) == len(SEEDS)
    assert {len(found.pools) for found in fits} >= {1, 2}
    assert {pool.size for found in fits for pool in found.pools} >= {1, 2, 4, 8, 16}
    sizes = [size for found in fits for size in found.sizes.values()]
    assert any(size.pipeline > 1 for size in sizes)
    assert any(size.tensor > 1 for size in sizes)
    offloads = {model.offload for found in fits if found.prediction for model in found.prediction.models.values()}
    assert offloads >= {"None", "All"}


@each_seed()
def test_every_model_is_placed_once(seed: int) -> None:
    job, _, mapping, prediction = planned(seed)
    homes = Counter(role for pool in mapping.pools for role in pool.models)
    assert homes == dict.fromkeys(job.models(), 1)
    assert set(mapping.sizes) == set(prediction.models) == set(job.models())
    for pool in mapping.pools:
        assert ("cost_critic" in pool.models) == ("critic" in pool.models and "cost_critic" in job.models())
        for role in pool.models:
            sizes = mapping.sizes[role]
            assert sizes.pipeline * sizes.tensor * sizes.data == pool.size


@each_seed()
def test_a_model_is_cut_as_it_can_be(seed: int) -> None:
    _, cluster, mapping, _ = planned(seed)
    _, _, shapes = drawn(seed)
    nodes = {group.gpu.name: group.gpus_per_node for group in cluster.groups}
    for pool in mapping.pools:
        for role in pool.models:
            sizes, model = mapping.sizes[role], shapes[role]
            assert sizes.pipeline <= model.layers
            assert sizes.tensor <= nodes[pool.gpu]
            assert model.heads % sizes.tensor == model.kv_heads % sizes.tensor == model.ffn % sizes.tensor == 0
            assert sizes.pipeline % sizes.generation_pipeline == sizes.tensor % sizes.generation_tensor == 0


@each_seed()
def test_no_gpu_is_used_twice(seed: int) -> None:
    _, cluster, mapping, _ = planned(seed)
    for group in cluster.groups:
        left = [group.gpus_per_node] * group.count
        pools = [pool for pool in mapping.pools if pool.gpu == group.gpu.name]
        for slots in sorted((slots for pool in pools for slots in pool.slots_per_machine), reverse=True):
            node = next((place for place, free in enumerate(left) if free >= slots), None)
            assert node is not None, "the pools do not pack into the nodes"
            left[node] -= slots
    assert {pool.gpu for pool in mapping.pools} <= {group.gpu.name for group in cluster.groups}


def fullest(prediction: Prediction, pool: MappedPool) -> float:
    """Bytes of a GPU at its fullest moment: one model has its turn, and the others' states are there as well."""
    models = {role: prediction.models[role] for role in pool.models}
    return max(
        sum(model.memory.get(stage, {}).values())
        + sum(sum(other.resident(stage).values()) for name, other in models.items() if name != role)
        for stage in STAGES
        for role, model in models.items()
    )


@each_seed()
def test_a_plan_stays_within_memory(seed: int) -> None:
    job, cluster, mapping, prediction = planned(seed)
    memory = {group.gpu.name: group.gpu.memory for group in cluster.groups}
    longest = job.spec.data.max_prompt_tokens + job.spec.data.max_response_tokens
    for pool in mapping.pools:
        assert held.fullest(mapping, pool, drawn(seed)[2], longest) <= prediction.memory_limit[pool.name]
        reserved = 0.5e9 + 0.411e9 * (pool.size > 1)
        generates = any("generation" in prediction.models[role].seconds for role in pool.models)
        assert prediction.memory_limit[pool.name] == pytest.approx(
            0.96 * (memory[pool.gpu] - reserved - 1e9 * generates)
        )
        assert 0 < fullest(prediction, pool) <= prediction.memory_limit[pool.name] * (1 + TOLERANCE)
    assert 0 <= prediction.gpu_memory_utilization <= 0.92 * (1 + TOLERANCE)


@each_seed()
def test_batches_divide_over_every_pool(seed: int) -> None:
    job, _, mapping, prediction = planned(seed)
    for pool in mapping.pools:
        assert job.sequences_per_step % pool.size == 0
        assert (job.spec.training.mini_batch_size or 0) % pool.size == 0
    for role, model in prediction.models.items():
        assert model.micro_batch >= 1
        longest = job.spec.data.max_prompt_tokens + job.spec.data.max_response_tokens
        most = job.spec.training.micro_batch_tokens
        assert most, "planned_jobs says it"
        assert model.micro_batch == 1 or model.micro_batch * longest <= most, role


@each_seed()
def test_a_step_is_the_sum_of_its_stages(seed: int) -> None:
    job, _, mapping, prediction = planned(seed)
    assert sum(prediction.stages.values()) == pytest.approx(prediction.step_seconds)
    sequences = job.sequences_per_step * (2 if job.spec.algorithm.name == "DPO" else 1)
    tokens = sequences * (job.spec.data.max_prompt_tokens + prediction.response_tokens)
    assert prediction.tokens_per_second == pytest.approx(tokens / prediction.step_seconds)
    for stage in STAGES:
        phases = [phase for phase in PHASES if STAGE_OF[phase] == stage]
        busy = [
            sum(prediction.models[role].seconds.get(phase, 0.0) for role in pool.models for phase in phases)
            for pool in mapping.pools
        ]
        assert prediction.stages[stage] >= max(busy) * (1 - TOLERANCE)
        if all(model.offload == "None" for model in prediction.models.values()) and stage != "preparation":
            assert prediction.stages[stage] == pytest.approx(max(busy)), "but for what is moved"


@each_seed(8)
def test_what_was_rejected_is_no_faster_and_has_a_reason(seed: int) -> None:
    job, _, mapping, prediction = planned(seed)
    seconds = [each.step_seconds for each in mapping.rejected]
    assert seconds == sorted(seconds)
    for each in mapping.rejected:
        is_simpler = len(mapping.pools) < len(each.pools)
        assert prediction.step_seconds <= each.step_seconds * (1.02 if is_simpler else 1)
        assert sorted(role for models, _, _ in each.pools for role in models) == sorted(job.models())
        assert each.reason


def with_more_nodes(cluster: Cluster) -> Cluster:
    first, *rest = cluster.groups
    return Cluster((replace(first, count=first.count + 1), *rest))


@each_seed(3)
def test_more_nodes_never_predict_a_worse_optimum(seed: int) -> None:
    job, cluster, shapes = drawn(seed)
    clusters = [cluster, with_more_nodes(cluster), with_more_nodes(with_more_nodes(cluster))]
    found = [plan(seed), *(auto_map(job, larger, shapes, device="GPU") for larger in clusters[1:])]
    seconds = [
        each.prediction.step_seconds if isinstance(each, DeviceMapping) and each.prediction else np.inf
        for each in found
    ]
    assert all(more <= fewer for fewer, more in pairwise(seconds))


def seconds_of(job: Job, cluster: Cluster, shapes: dict[Role, Architecture]) -> float:
    """Of a step of the best plan; inf where nothing fits."""
    task = task_of(job, shapes, device="GPU")
    found = task.search(task.costs(cluster))
    return found[0].seconds if found else np.inf


def growing(seed: int) -> tuple[Job, list[Cluster], dict[Role, Architecture]]:
    """A job with an odd batch, and nodes to which nodes, or GPUs on every node, are added twice."""
    draw = random.Random(seed)
    size = draw.choice([12, 20, 24, 60, 64, 96, 100, 250, 500])
    mini = size // draw.choice([each for each in (1, 2, 4, 5) if size % each == 0])
    algorithm = draw.choice(["PPO", "PPO", "ReMax"])
    lengths = {"maxPromptTokens": draw.choice([256, 1024]), "maxResponseTokens": draw.choice([256, 1024, 8192])}
    job = job_of(algorithm, training={"promptBatchSize": size, "miniBatchSize": mini}, data=lengths)
    network = draw.choice([None, None, 12.5 * GB, 100 * GB])
    gpu = GPUS[draw.choice(["a100-80g", "h100-80g", "l40s-48g", "l4-24g"])]
    nodes = NodeGroup(
        gpu=gpu,
        count=draw.randint(1, 4),
        gpus_per_node=draw.choice([1, 2, 3, 4, 6]),
        node_bandwidth=network,
        host_memory=draw.choice([None, 64 * GB, 250 * GB]),
    )
    clusters = [Cluster((nodes,))]
    for _ in range(2):
        if draw.random() < 0.5:
            nodes = replace(nodes, count=nodes.count + draw.choice([1, 1, 3]))
        else:
            nodes = replace(nodes, gpus_per_node=min(nodes.gpus_per_node + draw.choice([1, 2, 4]), 8))
        clusters.append(Cluster((nodes,)))
    return job, clusters, shapes_of(job, MODELS[draw.choice(["7B", "7B", "13B"])])


def never_worse(seed: int) -> None:
    job, clusters, shapes = growing(seed)
    seconds = [seconds_of(job, cluster, shapes) for cluster in clusters]
    assert all(more <= fewer * (1 + TOLERANCE) for fewer, more in pairwise(seconds)), seconds


@each_case("seed", range(4))
def test_more_gpus_of_a_kind_never_give_a_slower_plan_or_none(seed: int) -> None:
    never_worse(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 100))
def test_nor_do_they_in_five_hundred_cases(first: int) -> None:
    for seed in range(first, first + 100):
        never_worse(seed)


def test_a_batch_with_few_divisors_uses_some_gpus_of_a_node() -> None:
    """The issue's case: 8 GPUs, whose number does not divide 500, do no worse than 4, whose number does."""
    job = job_of("PPO", training={"promptBatchSize": 500, "miniBatchSize": 500}, data={"maxResponseTokens": 8192})
    four, eight = (seconds_of(job, cluster_of(("h100-80g", 1, gpus)), shapes_of(job)) for gpus in (4, 8))
    assert eight <= four < np.inf
    mapping = auto_map(job, cluster_of(("h100-80g", 4, 8)), shapes_of(job), device="GPU")
    assert isinstance(mapping, DeviceMapping)
    assert all(500 % pool.size == 0 and len(set(pool.slots_per_machine)) == 1 for pool in mapping.pools)
    assert sum(pool.size for pool in mapping.pools) in range(16, 33), "divisors of 500 that 4 nodes have room for"


def test_nodes_of_other_kinds_make_no_plan_slower() -> None:
    """Beside four others a group is searched with all GPUs of its nodes in use only, which 500 rows do not allow."""
    job = job_of("PPO", training={"promptBatchSize": 500, "miniBatchSize": 500})
    large, *others = cluster_of(("h100-80g", 4, 8), *[("t4-16g", 1, gpus) for gpus in (1, 2, 3, 4)]).groups
    seconds = []
    for cluster in (Cluster((large,)), Cluster((large, *others))):
        found = auto_map(job, cluster, shapes_of(job), device="GPU")
        assert isinstance(found, DeviceMapping)
        assert found.prediction
        seconds.append(found.prediction.step_seconds)
    assert seconds[1] <= seconds[0]


@each_seed(5)
def test_the_order_of_models_does_not_matter(seed: int) -> None:
    job, cluster, mapping, prediction = planned(seed)
    task = task_of(job, drawn(seed)[2], device="GPU")
    turned = replace(task, requests={role: task.requests[role] for role in reversed(list(task.requests))})
    again = mapping_of(turned, cluster)
    assert again
    assert again.prediction
    assert again.prediction.step_seconds == pytest.approx(prediction.step_seconds, rel=1e-12)
    found, before = (
        {(frozenset(pool.models), pool.gpu, pool.size) for pool in each.pools} for each in (again, mapping)
    )
    assert found == before


@each_seed(5)
def test_the_order_of_node_groups_does_not_matter(seed: int) -> None:
    job, cluster, mapping, prediction = planned(seed)
    turned = auto_map(job, Cluster(cluster.groups[::-1]), drawn(seed)[2], device="GPU")
    assert isinstance(turned, DeviceMapping)
    assert turned.prediction
    assert turned.prediction.step_seconds == pytest.approx(prediction.step_seconds, rel=1e-12)
    assert {(pool.models, pool.size) for pool in turned.pools} == {(pool.models, pool.size) for pool in mapping.pools}


def real_costs(seed: int) -> tuple[PoolCosts, list[str], tuple[float, ...]]:
    """Costs, models and prices of the groups; more than three models are tried on one kind of nodes."""
    job, cluster, shapes = drawn(seed)
    task = task_of(job, shapes, device="GPU")
    models: list[str] = [role for role in task.requests if role != "cost_critic"]
    costs = task.costs(Cluster(cluster.groups[:1]) if len(models) > 3 else cluster)
    return costs, models, tuple(setting.nodes.gpu_hour_price or 0.0 for setting in costs.settings)


@each_seed(4)
def test_the_pruned_search_finds_what_trying_everything_finds(seed: int) -> None:
    costs, models, prices = real_costs(seed)
    fastest = exhaustive(costs, models)
    limit = 1.3 * fastest[0].seconds if fastest else 1.0
    smallest, cheapest = Objective("fewest_gpus", most_seconds=limit), Objective("lowest_cost", prices=prices)
    for objective in (Objective(), smallest, cheapest):
        every = exhaustive(costs, models, objective)
        found = pruned(costs, models, 4, objective)
        assert [(one.seconds, one.gpus) for one in found] == [(one.seconds, one.gpus) for one in every[:4]]


def price_of(mapping: DeviceMapping, cluster: Cluster) -> float:
    prices = {group.gpu.name: group.gpu_hour_price or 0.0 for group in cluster.groups}
    assert mapping.prediction
    return mapping.prediction.step_seconds * sum(pool.size * prices[pool.gpu] for pool in mapping.pools)


@each_seed(4)
def test_other_objectives_are_met(seed: int) -> None:
    job, cluster, fastest, prediction = planned(seed)
    _, _, shapes = drawn(seed)
    gpus = sum(pool.size for pool in fastest.pools)
    for factor in (1.0, 2.0):
        limit = factor * prediction.step_seconds
        small = auto_map(job, cluster, shapes, device="GPU", objective=Objective("fewest_gpus", most_seconds=limit))
        assert isinstance(small, DeviceMapping)
        assert small.prediction
        assert small.prediction.step_seconds <= limit
        used, gpus = gpus, sum(pool.size for pool in small.pools)
        assert gpus <= used, "more time needs no more GPUs"
    prices = tuple(group.gpu_hour_price or 0.0 for group in cluster.groups)
    cheap = auto_map(job, cluster, shapes, device="GPU", objective=Objective("lowest_cost", prices=prices))
    assert isinstance(cheap, DeviceMapping)
    assert price_of(cheap, cluster) <= price_of(fastest, cluster)


def test_a_pool_never_spans_types_and_the_better_type_is_taken() -> None:
    job = job_of("PPO", training={"promptBatchSize": 128})
    cluster = cluster_of(("a10-24g", 4, 8), ("h100-80g", 1, 8))
    mapping = auto_map(job, cluster, shapes_of(job), device="GPU")
    assert isinstance(mapping, DeviceMapping)
    assert {pool.gpu for pool in mapping.pools if "actor" in pool.models} == {"h100-80g"}


def test_copies_of_the_weights_take_memory() -> None:
    def gpus_of_a_copy(replicas: int) -> float:
        parallelism = {"replicas": replicas, "data": 8}
        job = job_of("SFT", models={"actor": {"parallelism": parallelism}})
        mapping = auto_map(job, cluster_of(("h200-141g", 1, 8)), shapes_of(job), device="GPU")
        assert isinstance(mapping, DeviceMapping)
        assert mapping.prediction
        assert mapping.sizes["actor"].replicas == replicas
        return whole / mapping.prediction.models["actor"].memory["training"]["weights"]

    whole = 4 * MODELS["7B"].parameters
    assert gpus_of_a_copy(1) == pytest.approx(8)
    assert gpus_of_a_copy(2) == pytest.approx(4)


def test_a_copy_on_every_gpu_may_not_fit() -> None:
    job = job_of("SFT", models={"actor": {"parallelism": {"replicas": 8, "data": 8}}})
    found = auto_map(job, cluster_of(("a100-80g", 1, 8)), shapes_of(job), device="GPU")
    assert isinstance(found, Infeasible), "12 bytes of each of 6.7e9 parameters are more than a GPU has"


def test_an_objective_changes_the_plan() -> None:
    job, shapes = job_of("PPO"), shapes_of(job_of("PPO"))
    cluster = cluster_of(("h100-80g", 4, 8))
    fast = auto_map(job, cluster, shapes, device="GPU")
    assert isinstance(fast, DeviceMapping)
    assert fast.prediction
    slow = 4 * fast.prediction.step_seconds
    small = auto_map(job, cluster, shapes, device="GPU", objective=Objective("fewest_gpus", most_seconds=slow))
    cheap = auto_map(job, cluster, shapes, device="GPU", objective=Objective("lowest_cost", prices=(2.0,)))
    assert isinstance(small, DeviceMapping)
    assert isinstance(cheap, DeviceMapping)
    assert cheap.prediction
    used = [sum(pool.size for pool in found.pools) for found in (fast, small, cheap)]
    assert used[1] < used[0]
    assert used[2] * cheap.prediction.step_seconds < used[0] * fast.prediction.step_seconds


@pytest.mark.parametrize(("change", "reshards"), [("models.reward=", False), ("models.reward.uri=hf://r", True)])
def test_unchanging_weights_are_resharded_only_to_make_room(change: str, *, reshards: bool) -> None:
    job = Job.parse(made("Generate", (change,)))
    mapping = auto_map(job, cluster_of(("a100-80g", 1, 8)), shapes_of(job), device="GPU")
    assert isinstance(mapping, DeviceMapping)
    assert mapping.prediction
    assert ("reshard" in mapping.prediction.phases) == reshards


def test_of_placements_about_as_fast_the_simpler_is_taken() -> None:
    data, batch = {"maxPromptTokens": 1024, "maxResponseTokens": 1024}, {"promptBatchSize": 1024, "miniBatchSize": 128}
    job = job_of("PPO", data=data, training=batch)
    nodes = NodeGroup(gpu=GPUS["a100-80g"], count=16, gpus_per_node=8, node_bandwidth=25 * GB)
    cluster = Cluster((nodes,))
    found = auto_map(job, cluster, shapes_of(job, MODELS["7B"]), device="GPU")
    assert isinstance(found, DeviceMapping)
    assert found.prediction
    fastest = found.rejected[0]
    assert len(found.pools) < len(fastest.pools)
    assert 1 < found.prediction.step_seconds / fastest.step_seconds <= 1.02
    assert fastest.reason == "takes 3 pools instead of 2"
    cheap = auto_map(
        job,
        cluster,
        shapes_of(job, MODELS["7B"]),
        device="GPU",
        objective=Objective("fewest_gpus", most_seconds=1.001 * fastest.step_seconds),
    )
    assert isinstance(cheap, DeviceMapping)
    assert cheap.prediction
    assert cheap.prediction.step_seconds < found.prediction.step_seconds, "a limit of seconds is kept"
