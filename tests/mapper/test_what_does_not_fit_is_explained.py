"""Jobs that fit nowhere: what is short, by how much, and what would do; and placements made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from rlhf_mapper.architecture import architecture_of
from rlhf_mapper.auto_map import auto_map, predict, short_of_states
from rlhf_mapper.hardware import GPUS, Cluster
from rlhf_mapper.mapping import DeviceMapping, Infeasible
from rlhf_mapper.place import place
from rlhf_planning.job_plan import plan_job
from tests.mapper.oracles.testbed import MODELS
from tests.mapper.planned_jobs import cluster_of, job_of, shapes_of

SIZE = MODELS["70B"].parameters
MORE_HOST = " GB of host memory for each GPU (for all of a node: spec.runtime.worker.memory, or hostMemoryGB)"


def room(gpu: str, gpus: int = 1) -> float:
    """Bytes for states of so many GPUs: less the context, NCCL's buffers where there are several, and 4 %."""
    return gpus * 0.96 * (GPUS[gpu].memory - 0.5e9 - 0.411e9 * (gpus > 1))


def without_host_memory(*groups: tuple[str, int, int]) -> Cluster:
    return Cluster(tuple(replace(group, host_memory=1e9) for group in cluster_of(*groups).groups))


def recomputed(batch: int) -> Job:
    """SFT of so many rows a step."""
    return job_of("SFT", models={"actor": {"gradientCheckpointing": True}}, training={"batchSize": batch})


def answer(job: Job, cluster: Cluster) -> DeviceMapping | Infeasible:
    return auto_map(job, cluster, shapes_of(job, MODELS["70B"]), device="GPU")


def refused(job: Job, cluster: Cluster) -> Infeasible:
    found = answer(job, cluster)
    assert isinstance(found, Infeasible)
    return found


def test_a_large_model_on_one_small_gpu_is_short_of_its_states() -> None:
    short = refused(recomputed(960), cluster_of(("a10-24g", 1, 1)))
    assert short.short_bytes == pytest.approx(12 * SIZE - room("a10-24g")), "float32 weights and two moments"
    assert (
        short.reason == "the states of actor take 827.7 GB, but 1 x a10-24g hold 22.4 GB, "
        "and half of the host memory, 48.0 GB, is too small for them to wait there"
    )


@pytest.mark.parametrize(("gpu", "gpus_per_node"), [("a10-24g", 1), ("h100-80g", 4), ("h200-141g", 2)])
def test_the_smallest_cluster_does_and_one_node_less_does_not(gpu: str, gpus_per_node: int) -> None:
    job = recomputed(960)
    ((name, gpus),) = refused(job, cluster_of((gpu, 1, gpus_per_node))).smallest
    nodes, rest = divmod(gpus, gpus_per_node)
    assert (name, rest) == (gpu, 0)
    assert isinstance(answer(job, cluster_of((gpu, nodes, gpus_per_node))), DeviceMapping)
    less = refused(job, cluster_of((gpu, nodes - 1, gpus_per_node)))
    assert less.smallest == ((gpu, gpus),)


def test_every_type_of_the_cluster_has_its_own_smallest_cluster() -> None:
    job = recomputed(960)
    short = refused(job, cluster_of(("a10-24g", 1, 8), ("h100-80g", 1, 8)))
    assert dict(short.smallest).keys() == {"a10-24g", "h100-80g"}
    assert dict(short.smallest)["h100-80g"] < dict(short.smallest)["a10-24g"]
    assert short.short_bytes == pytest.approx(12 * SIZE - 8 * (room("a10-24g", 8) + room("h100-80g", 8)) / 8)
    assert "8 x a10-24g and 8 x h100-80g" in short.reason


def test_models_that_take_turns_are_short_of_the_largest() -> None:
    job = job_of("SafeRLHF")
    (nodes,) = cluster_of(("h100-80g", 1, 1)).groups
    short = refused(job, Cluster((replace(nodes, host_memory=8e12),)))
    assert short.short_bytes == pytest.approx(12 * SIZE - room("h100-80g"))
    assert short.reason == (
        "the states of the largest of actor, critic, reference, reward, cost, cost_critic take 827.7 GB, "
        "but 1 x h100-80g hold 81.1 GB"
    )


def test_states_wait_in_host_memory_as_far_as_there_is_room() -> None:
    job = job_of("PPO", models={role: {"gradientCheckpointing": True} for role in ("actor", "critic")})

    def on(host_memory: float | None) -> DeviceMapping | Infeasible:
        """On two H100 with so much host memory each."""
        (nodes,) = cluster_of(("h100-80g", 1, 2)).groups
        cluster = Cluster((replace(nodes, host_memory=host_memory),))
        return auto_map(job, cluster, shapes_of(job, MODELS["7B"]), device="GPU")

    for enough in (None, 300e9):
        found = on(enough)
        assert isinstance(found, DeviceMapping)
        assert found.prediction
        assert found.prediction.models["actor"].offload in ("All", "OptimizerInHost")
    short = on(100e9)
    assert isinstance(short, Infeasible)
    assert short.reason == (
        "the states of actor, critic, reference, reward take 186.8 GB, but 2 x h100-80g hold 161.3 GB, "
        "and half of the host memory, 100.0 GB, is too small for them to wait there"
    )


def test_enough_host_memory_is_named_where_models_could_wait() -> None:
    (nodes,) = cluster_of(("h100-80g", 1, 2)).groups
    job = job_of("PPO", models={role: {"gradientCheckpointing": True} for role in ("actor", "critic")})

    def on(host_memory: float) -> DeviceMapping | Infeasible:
        cluster = Cluster((replace(nodes, host_memory=host_memory),))
        return auto_map(job, cluster, shapes_of(job, MODELS["7B"]), device="GPU")

    short = on(100e9)
    assert isinstance(short, Infeasible)
    (enough,) = (int(each.removesuffix(MORE_HOST)) for each in short.options if each.endswith(MORE_HOST))
    assert isinstance(on(enough * 1e9), DeviceMapping)
    assert isinstance(on((enough - 16) * 1e9), Infeasible)


def test_a_small_adapter_is_named_where_it_fits() -> None:
    job = recomputed(960)
    *_, adapter = refused(job, without_host_memory(("h100-80g", 1, 8))).options
    assert adapter == "spec.models.actor.lora: {rank: 16}"
    actor = {"gradientCheckpointing": True, "lora": {"rank": 16}}
    small = job_of("SFT", models={"actor": actor}, training={"batchSize": 960})
    assert isinstance(answer(small, without_host_memory(("h100-80g", 1, 8))), DeviceMapping)


def test_larger_gpus_are_of_the_vendor_that_is_there() -> None:
    """The trainer's image is for one vendor: four B300 would do, but not with it."""
    host, adapter = refused(recomputed(960), without_host_memory(("mi300x-192g", 1, 4))).options
    assert host.endswith(MORE_HOST)
    assert "lora" in adapter


def test_models_on_cpu_slots_stay_all_at_once() -> None:
    job, slots = job_of("DPO"), cluster_of(("cpu-slot", 1, 1))
    found = auto_map(job, slots, shapes_of(job, MODELS["7B"]), device="CPU")
    assert isinstance(found, Infeasible)
    assert found.short_bytes == pytest.approx((12 + 4) * MODELS["7B"].parameters - 0.92 * 8e9)
    assert found.reason.startswith("the states of actor, reference take 107.8 GB")


@pytest.mark.parametrize(("size", "gpu"), [("7B", "a10-24g"), ("13B", "h100-80g")])
def test_what_would_do_holds_what_is_short(size: Any, gpu: str) -> None:
    job = job_of("PPO", models={role: {"gradientCheckpointing": True} for role in ("actor", "critic")})
    short = auto_map(job, without_host_memory((gpu, 1, 1)), shapes_of(job, MODELS[size]), device="GPU")
    assert isinstance(short, Infeasible)
    ((_, gpus),) = short.smallest
    assert short.short_bytes <= room(gpu, gpus) - room(gpu)


def test_a_batch_may_be_too_small_for_the_gpus_that_memory_needs() -> None:
    job = recomputed(8)
    short = refused(job, cluster_of(("a10-24g", 16, 8)))
    assert (short.short_bytes, short.smallest) == (0.0, ())
    assert short.reason == "actor do not fit on 8 slots, the most for a pool with which the batch (8 sequences) divides"


def test_a_batch_that_divides_over_all_gpus_is_named() -> None:
    short = refused(recomputed(8), cluster_of(("a10-24g", 16, 8)))
    assert short.options[-1] == "spec.training.batchSize: 128"
    assert str(short).endswith("spec.training.batchSize: 128 would do")
    assert isinstance(answer(recomputed(128), cluster_of(("a10-24g", 16, 8))), DeviceMapping)


def test_the_smallest_larger_type_of_gpu_is_named() -> None:
    job = recomputed(960)
    larger, *_ = refused(job, without_host_memory(("a100-40g", 3, 8))).options
    gpus, _, gpu = larger.partition(" x ")
    assert (gpus, gpu) == ("24", "a100-80g")
    assert isinstance(answer(job, cluster_of((gpu, 3, 8))), DeviceMapping)


def test_slots_of_a_cpu_are_of_no_other_type() -> None:
    job = job_of("DPO", models={"actor": {"gradientCheckpointing": True}})
    found = auto_map(job, cluster_of(("cpu-slot", 1, 1)), shapes_of(job, MODELS["7B"]), device="CPU")
    assert isinstance(found, Infeasible)
    assert found.options == ()


def test_models_without_a_shape_have_a_lower_bound() -> None:
    job, node = job_of("PPO"), cluster_of(("cpu-slot", 1, 8))
    assert short_of_states(job, node, {}) is None
    assert short_of_states(job, node, {"actor": 1e8, "critic": 0.0}) is None
    short = short_of_states(job, node, {"actor": SIZE, "critic": 1e9, "reward": 0.0})
    assert short
    needed = 12 * (SIZE + 1e9)
    assert short.short_bytes == pytest.approx(needed - 0.92 * 8 * node.groups[0].gpu.memory)
    assert short.reason.startswith(f"the states of actor, critic take at least {needed / 1e9:,.1f} GB")


def test_states_that_fit_may_leave_no_room() -> None:
    job = job_of("SFT", data={"maxResponseTokens": 1_000_000}, training={"batchSize": 96})
    short = refused(job, cluster_of(("h100-80g", 4, 8)))
    assert short.short_bytes == 0
    assert "activations" in short.reason


def test_layers_are_recomputed_where_nothing_else_fits() -> None:
    """One row of 192,000 tokens of a 7B model: what 32 layers keep is more than a GPU has, their inputs are less."""

    def asked(recomputes: dict[str, bool]) -> DeviceMapping | Infeasible:
        data = {"maxPromptTokens": 96_000, "maxResponseTokens": 96_000}
        training = {"batchSize": 32, "kernels": "Plain", "microBatchTokens": 192_000}  # rows are not cut over ranks
        job = job_of("SFT", models={"actor": recomputes}, data=data, training=training)
        return auto_map(job, cluster_of(("h200-141g", 1, 8)), shapes_of(job, MODELS["7B"]), device="GPU")

    refused = asked({"gradientCheckpointing": False})
    assert isinstance(refused, Infeasible)
    assert "spec.models.actor.gradientCheckpointing: true" in refused.options
    for open_or_asked in ({}, {"gradientCheckpointing": True}):
        found = asked(open_or_asked)
        assert isinstance(found, DeviceMapping)
        assert found.prediction
        assert found.prediction.models["actor"].recomputes


def test_a_row_that_no_rank_can_hold_is_cut_over_ranks() -> None:
    """64,000 tokens on GPUs of 40 GB: a remedy where the sizes are fixed, else the mapper's choice."""

    def asked(**actor: Any) -> DeviceMapping | Infeasible:
        data = {"maxPromptTokens": 32_000, "maxResponseTokens": 32_000}
        job = job_of("SFT", models={"actor": actor}, data=data, training={"batchSize": 8})
        return auto_map(job, cluster_of(("a100-40g", 1, 8)), shapes_of(job, MODELS["7B"]), device="GPU")

    refused, found = asked(parallelism={"pipeline": 1}), asked()
    assert isinstance(refused, Infeasible)
    assert "spec.models.actor.parallelism.context: 2" in refused.options
    assert isinstance(asked(parallelism={"context": 2}), DeviceMapping)
    assert isinstance(found, DeviceMapping)
    assert found.sizes["actor"].context > 1


def test_a_model_that_fits_keeps_its_activations() -> None:
    job = job_of("SFT")
    found = auto_map(job, cluster_of(("h200-141g", 1, 8)), shapes_of(job, MODELS["7B"]), device="GPU")
    assert isinstance(found, DeviceMapping)
    assert found.prediction
    assert not found.prediction.models["actor"].recomputes


def test_what_is_offloaded_needs_room_in_the_nodes() -> None:
    job = job_of("PPO", models={role: {"gradientCheckpointing": True} for role in ("actor", "critic")})
    (group,) = cluster_of(("a100-80g", 1, 2)).groups
    shapes = shapes_of(job, MODELS["7B"])
    enough, little = (
        auto_map(job, Cluster((replace(group, host_memory=memory),)), shapes, device="GPU") for memory in (1e12, 25e9)
    )
    assert isinstance(enough, DeviceMapping)
    assert enough.prediction
    assert {model.offload for model in enough.prediction.models.values()} - {"None"}
    assert isinstance(little, Infeasible)


@pytest.mark.parametrize(("size", "gpus", "gb"), [("7B", 1, 108), ("34B", 8, 67.5)])
def test_a_model_with_its_optimizer_in_the_host_fits(size: Any, gpus: int, gb: float) -> None:
    """16 bytes a parameter in host memory: float32 weights, gradients and two moments."""
    job = job_of("GRPO", training={"promptBatchSize": 64}, rollout={"samplesPerPrompt": 8})
    shapes = shapes_of(job, MODELS[size])
    found = auto_map(job, cluster_of(("h100-80g", 1, gpus)), shapes, device="GPU")
    assert isinstance(found, DeviceMapping)
    assert found.prediction
    actor = found.prediction.models["actor"]
    assert actor.offload == "OptimizerInHost"
    assert actor.memory["training"]["weights"] == 0
    assert found.prediction.host_memory[found.pools[0].name] / 1e9 == pytest.approx(gb, abs=1)
    assert isinstance(auto_map(job, without_host_memory(("h100-80g", 1, gpus)), shapes, device="GPU"), Infeasible)


def test_an_optimizer_in_the_host_is_named() -> None:
    job = job_of("SFT", models={"actor": {"offload": "All"}})
    found = auto_map(job, cluster_of(("h100-80g", 1, 1)), shapes_of(job, MODELS["7B"]), device="GPU")
    assert isinstance(found, Infeasible)
    assert "spec.models.actor.offload: OptimizerInHost" in found.options


def test_gpus_without_bf16_are_refused_with_a_remedy() -> None:
    job = job_of("SFT", data={"maxPromptTokens": 64, "maxResponseTokens": 64})
    small = replace(MODELS["7B"], layers=2, hidden=512, heads=4, kv_heads=4, ffn=1024)
    found = auto_map(job, cluster_of(("t4-16g", 1, 4)), shapes_of(job, small), device="GPU")
    assert isinstance(found, Infeasible)
    assert found.reason == "vLLM refuses bf16 on t4-16g, whose compute capability is below 8.0"
    assert "spec.training.precision: FP32" in found.options
    whole = job_of("SFT", data={"maxPromptTokens": 64, "maxResponseTokens": 64}, training={"precision": "FP32"})
    found = auto_map(whole, cluster_of(("t4-16g", 1, 4)), shapes_of(whole, small), device="GPU")
    assert isinstance(found, DeviceMapping)
    both = auto_map(job, cluster_of(("t4-16g", 1, 4), ("l4-24g", 1, 4)), shapes_of(job, small), device="GPU")
    assert isinstance(both, DeviceMapping)
    assert {pool.gpu for pool in both.pools} == {"l4-24g"}


def test_a_context_that_a_model_does_not_have_is_refused() -> None:
    def planned(algorithm: str, **positions: Any) -> DeviceMapping | Infeasible:
        config = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024}
        shape = architecture_of({**config, "vocab_size": 1000, **positions})
        job = job_of(algorithm, data={"maxPromptTokens": 1000, "maxResponseTokens": 9000})
        return auto_map(job, cluster_of(("h100-80g", 1, 1)), shapes_of(job, shape), device="GPU")

    short = {"max_position_embeddings": 8192}
    with pytest.raises(SpecError, match=r"is 10000, but actor, \S+, reads 8192 tokens at most .*with scaled RoPE"):
        planned("PPO", **short)
    for rope in (
        {"rope_type": "linear", "factor": 2.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    ):
        assert isinstance(planned("PPO", **short, rope_scaling=rope), DeviceMapping)
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1024}
    with pytest.raises(SpecError):
        planned("PPO", **short, rope_scaling=llama3)
    assert isinstance(planned("SFT", **short), DeviceMapping), "rows of a data set may all be short"
    assert isinstance(planned("PPO"), DeviceMapping), "not known"


def by_hand(*pools: tuple[str, list[str], int, int], **changes: Any) -> Job:
    """PPO; (name, models, nodes, slots of a node) of each pool."""
    written = [
        {"name": name, "models": models, "nodes": nodes, "slotsPerNode": slots} for name, models, nodes, slots in pools
    ]
    return job_of("PPO", placement={"mode": "Manual", "pools": written}, resources={"device": "GPU"}, **changes)


LEFT, RIGHT = ["actor", "reference"], ["critic", "reward"]
TWO_NODES = cluster_of(("h100-80g", 2, 8))


def prediction_of(
    job: Job, cluster: Cluster, size: Any = "7B", gpus: tuple[int, ...] = (8, 8)
) -> DeviceMapping | Infeasible:
    placed = place(job, gpus)
    return predict(job, placed, cluster, shapes_of(job, MODELS[size]))


def test_pools_made_by_hand_are_predicted_as_they_are() -> None:
    asked = {"actor": {"parallelism": {"tensor": 2}}}
    job = by_hand(("left", LEFT, 1, 8), ("right", RIGHT, 1, 8), models=asked, rollout={"tensorParallel": 1})
    mapping = prediction_of(job, TWO_NODES)
    assert isinstance(mapping, DeviceMapping)
    assert mapping.prediction
    assert [(pool.name, pool.models, pool.size, pool.gpu) for pool in mapping.pools] == [
        ("left", ("actor", "reference"), 8, "h100-80g"),
        ("right", ("critic", "reward"), 8, "h100-80g"),
    ]
    assert {role: str(sizes) for role, sizes in mapping.sizes.items()} == {
        "actor": "1-2-4",
        "reference": "1-2-4",
        "critic": "1-1-8",
        "reward": "1-1-8",
    }
    assert mapping.sizes["actor"].generation_tensor == 1
    best = auto_map(job_of("PPO"), TWO_NODES, shapes_of(job), device="GPU")
    assert isinstance(best, DeviceMapping)
    assert best.prediction
    assert mapping.prediction.step_seconds >= best.prediction.step_seconds


def test_a_mapping_predicts_the_same_when_it_is_made_by_hand() -> None:
    job = job_of("PPO")
    best = auto_map(job, TWO_NODES, shapes_of(job), device="GPU")
    assert isinstance(best, DeviceMapping)
    again = predict(job, best, TWO_NODES, shapes_of(job))
    assert isinstance(again, DeviceMapping)
    assert again.prediction
    assert best.prediction
    assert again.prediction.step_seconds == pytest.approx(best.prediction.step_seconds)
    assert again.sizes == best.sizes


def test_a_pool_on_parts_of_several_nodes_pays_for_their_network() -> None:
    whole, halves = (
        prediction_of(by_hand(("left", LEFT, count, slots), ("right", RIGHT, count, slots)), TWO_NODES, gpus=gpus)
        for count, slots, gpus in ((1, 8, (8, 8)), (2, 4, (4, 4, 4, 4)))
    )
    assert isinstance(whole, DeviceMapping)
    assert isinstance(halves, DeviceMapping)
    assert whole.prediction
    assert halves.prediction
    assert halves.prediction.step_seconds > whole.prediction.step_seconds


def test_a_mapping_is_predicted_on_the_gpus_that_it_names() -> None:
    job, both = job_of("PPO"), cluster_of(("h100-80g", 1, 8), ("a100-80g", 1, 8))
    for gpu in ("h100-80g", "a100-80g"):
        best = auto_map(job, cluster_of((gpu, 1, 8)), shapes_of(job), device="GPU")
        assert isinstance(best, DeviceMapping)
        again = predict(job, best, both, shapes_of(job))
        assert isinstance(again, DeviceMapping)
        assert {pool.gpu for pool in again.pools} == {gpu}
        assert again.prediction
        assert best.prediction
        assert again.prediction.step_seconds == pytest.approx(best.prediction.step_seconds)


def test_models_too_large_for_a_pool_by_hand_are_refused() -> None:
    job = by_hand(("left", LEFT, 1, 8), ("right", RIGHT, 1, 1))
    found = prediction_of(job, TWO_NODES, size="34B")
    assert isinstance(found, Infeasible)
    assert "right" in found.reason


def test_a_pool_made_by_hand_lies_on_one_type_of_gpu() -> None:
    job = by_hand(("small", RIGHT, 1, 4), ("large", LEFT, 1, 8))
    types = cluster_of(("h100-80g", 1, 8), ("h200-141g", 1, 4))
    mapping = prediction_of(job, types, gpus=(8, 4))
    assert isinstance(mapping, DeviceMapping)
    assert [(pool.name, pool.gpu) for pool in mapping.pools] == [("small", "h200-141g"), ("large", "h100-80g")]
    halves = cluster_of(("h100-80g", 1, 4), ("h200-141g", 2, 4))
    assert isinstance(prediction_of(job, halves, gpus=(4, 4, 4)), DeviceMapping)
    parts = cluster_of(("h100-80g", 1, 4), ("h200-141g", 1, 4), ("a100-80g", 1, 4))
    found = prediction_of(job, parts, gpus=(4, 4, 4))
    assert isinstance(found, Infeasible)
    assert "8 GPUs for pool large" in found.reason


def test_pools_made_by_hand_may_take_no_more_than_there_is() -> None:
    job = by_hand(("left", LEFT, 1, 8), ("right", RIGHT, 1, 8))
    found = prediction_of(job, cluster_of(("h100-80g", 1, 8)))
    assert isinstance(found, Infeasible)
    assert found.reason == "the pools of the manifest take 16 GPUs, but the nodes have 8"


def test_pools_made_by_hand_say_what_they_lack_and_a_remedy() -> None:
    job = by_hand(("all", [*LEFT, *RIGHT], 1, 4))
    shapes, one_node = shapes_of(job, MODELS["13B"]), without_host_memory(("h100-80g", 1, 8))
    found = plan_job(job, one_node, shapes, device="GPU")
    assert isinstance(found, Infeasible)
    lacks = int(found.reason.removeprefix("the models of pool all do not fit on its GPU slots: each slot lacks ")[:-3])
    assert found.short_bytes == 4 * lacks * 1e9
    assert "spec.placement.mode: Auto, without pools" in found.options
    assert isinstance(plan_job(job_of("PPO"), one_node, shapes, device="GPU"), DeviceMapping)
    (group,) = one_node.groups
    for more, fits in ((lacks - 1, False), (lacks, True)):
        gpu = replace(group.gpu, memory=group.gpu.memory + more * 1e9)
        again = plan_job(job, Cluster((replace(group, gpu=gpu),)), shapes, device="GPU")
        assert isinstance(again, DeviceMapping) == fits
