"""Plans of mixtures whose layers no GPU can hold whole, in the shapes of well-known models."""

from __future__ import annotations

from functools import cache

import pytest

from rlhf_api.job import Job
from rlhf_api.spec.model_shape import Shape
from rlhf_mapper.auto_map import auto_map, predict
from rlhf_mapper.config_file import architecture_in
from rlhf_mapper.mapping import DeviceMapping, as_json
from rlhf_mapper.place import place
from rlhf_planning.sized_job import placed_document
from tests.mapper.planned_jobs import cluster_of, job_of, shapes_of

LARGE = architecture_in(Shape(name="qwen3-235b-a22b"), "actor")
SHAPES = {
    "235B": LARGE,
}


def grpo() -> Job:
    data = {"maxPromptTokens": 1024, "maxResponseTokens": 7168}
    shape = {"actor": {"shape": {"name": "qwen3-235b-a22b"}}}
    return job_of("GRPO", shape, data=data, rollout={"samplesPerPrompt": 8}, training={"miniBatchSize": 512})


@cache
def planned(model: str, nodes: int) -> DeviceMapping:
    found = auto_map(grpo(), cluster_of(("h100-80g", nodes, 8)), shapes_of(grpo(), SHAPES[model]), device="GPU")
    assert isinstance(found, DeviceMapping), found
    return found


@pytest.mark.parametrize(("model", "nodes"), [("235B", 16), ("235B", 32)])
def test_a_mixture_is_cut_so_that_it_fits(model: str, nodes: int) -> None:
    found = planned(model, nodes)
    actor = found.sizes["actor"]
    assert actor.expert > 1
    assert SHAPES[model].experts % actor.expert == actor.shards * actor.tensor % actor.expert == 0
    assert as_json(found)["models"]["actor"]["e"] == actor.expert
    assert f"actor {actor.pipeline}-{actor.tensor}-{actor.data}, expert {actor.expert}" in found.described(
        found.pools[0]
    )


def test_a_generator_may_have_more_ranks_than_key_heads() -> None:
    pools = [{"name": "train", "models": ["actor", "reference", "reward"], "nodes": 16, "slotsPerNode": 8}]
    pools.append({"name": "write", "models": ["rollout"], "nodes": 16, "slotsPerNode": 8})
    made = grpo().model_dump(mode="json", by_alias=True, exclude_none=True)
    made["spec"]["placement"] = {"mode": "Manual", "pools": pools}
    made["spec"]["rollout"] |= {"tensorParallel": 2 * LARGE.kv_heads}
    job = Job.parse(made)
    found = predict(job, place(job, (8,) * 32), cluster_of(("h100-80g", 32, 8)), shapes_of(job, LARGE))
    assert isinstance(found, DeviceMapping), found
    assert found.sizes["rollout"].tensor == 2 * LARGE.kv_heads == 8
    assert LARGE.cannot_be_cut(tensor=8), "no head is cut in training"


def test_a_step_of_a_mixture_is_faster_on_more_gpus() -> None:
    seconds = [planned("235B", nodes).prediction for nodes in (16, 32)]
    assert seconds[0]
    assert seconds[1]
    assert seconds[1].step_seconds < seconds[0].step_seconds


def test_a_manifest_with_a_plans_sizes_is_predicted_as_the_plan() -> None:
    found, document = planned("235B", 32), grpo().model_dump(mode="json", by_alias=True, exclude_none=True)
    made = placed_document(document, found)
    assert made["spec"]["models"]["actor"]["parallelism"]["expert"] == found.sizes["actor"].expert
    job = Job.parse(made)
    again = predict(job, place(job, (8,) * 32), cluster_of(("h100-80g", 32, 8)), shapes_of(job, LARGE))
    assert isinstance(again, DeviceMapping), again
    assert again.prediction
    assert found.prediction
    assert again.prediction.step_seconds == pytest.approx(found.prediction.step_seconds)
