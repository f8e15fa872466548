"""A job whose GPUs cannot be used is told why, and does not run on CPU slots in silence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhf_api.job import Job
from rlhf_operator.cluster import view
from rlhf_operator.cluster.cache import Cache
from rlhf_operator.placement.map_job import map_job
from tests.each import each_case
from tests.operator.rendered import A100, SETTINGS, changed, node, snapshot

PPO = "helpful-ppo"


@each_case("device", ["Auto", "GPU"])
@each_case(
    ("other", "message"),
    [
        (
            {"taints": (("dedicated", "gpu", "NoSchedule"),)},
            "1 node tainted dedicated=gpu:NoSchedule, which spec.runtime.worker.template",
        ),
        ({"schedulable": False}, "1 node cordoned, which kubectl uncordon ends"),
        ({"ready": False}, "1 node not ready"),
        (
            {"gpus": 0},
            "1 node without nvidia.com/gpu (is its device plugin up?), though labelled nvidia.com/gpu.product",
        ),
        ({"resource": "amd.com/gpu"}, "1 node with amd.com/gpu instead of nvidia.com/gpu, which spec.runtime."),
        ({"resource": "nvidia.com/mig-1g.5gb"}, "1 node with nvidia.com/mig-1g.5gb instead of nvidia.com/gpu"),
    ],
    ids=["taint", "cordon", "not ready", "no device plugin", "another vendor", "slices"],
)
def test_gpus_out_of_reach_are_named(device: str, other: dict[str, Any], message: str) -> None:
    job = changed(PPO, {"resources.device": device})
    fields: dict[str, Any] = {"gpus": 8, "product": A100} | other
    answer = map_job(job, snapshot(job, [node("cpu"), node("n", **fields)]), SETTINGS)
    assert answer.mapping is None
    assert answer.reason == "GPUNodesUnusable"
    assert answer.message.startswith(f"no node with GPUs is usable: {message}")
    assert answer.message.endswith("; or set spec.resources.device to CPU")


def test_gpus_for_resource_claims_are_named() -> None:
    cache = Cache()
    for number in range(2):
        metadata = {"name": f"slice-{number}", "uid": f"{number}"}
        devices = [{"name": f"gpu-{place}"} for place in range(4)]
        spec = {"nodeName": "dra", "driver": "gpu.nvidia.com", "devices": devices}
        cache.put("slices", {"metadata": metadata, "spec": spec})
    found = view.claimable_gpus(cache)
    assert found == {"dra": {"gpu.nvidia.com": 8}}
    job = changed(PPO, {"resources.device": "Auto"})
    seen = replace(snapshot(job, [node("cpu"), node("dra")]), claimable_gpus=found)
    answer = map_job(job, seen, SETTINGS)
    assert answer.reason == "GPUNodesUnusable"
    assert "1 node with GPUs for resource claims only (DRA, gpu.nvidia.com), on which no job is" in answer.message


def test_a_job_that_asks_for_cpu_slots_gets_them() -> None:
    job = changed(PPO, {"resources.device": "CPU"})
    there = [node("cpu"), node("n", gpus=8, product=A100, schedulable=False)]
    assert map_job(job, snapshot(job, there), SETTINGS).mapping


def test_small_models_run_on_cpu_slots_and_it_is_said() -> None:
    job = changed(PPO, {})
    answer = map_job(job, snapshot(job, [node("cpu")]), SETTINGS)
    assert answer.mapping
    assert "; on CPU slots, as no node has GPUs" in answer.message


def large() -> Job:
    """A job with a model of 8 billion parameters."""
    return changed("helpful-sft", {"models.actor.shape": {"name": "llama-3-8b"}})


def test_large_models_get_no_cpu_slots_unasked() -> None:
    answer = map_job(large(), snapshot(large(), [node("cpu")]), SETTINGS)
    assert answer.reason == "NoFeasiblePlacement"
    assert "million parameters in all; device Auto takes CPU slots for up to 100 million" in answer.message


@pytest.mark.parametrize("device", ["Auto", "CPU"])
def test_models_of_unknown_size_get_no_cpu_slots_unasked(device: str) -> None:
    job = changed("helpful-sft", {"models.actor.uri": "hf://someone/model", "resources.device": device})
    answer = map_job(job, snapshot(job, [node("cpu")]), SETTINGS)
    assert (answer.reason, answer.mapping is None) == ("ShapesUnknown", device == "Auto")
    if device == "Auto":
        assert answer.message.startswith("no node has GPUs, and spec.models.actor.uri: hf://someone/model: ")
        assert answer.message.endswith("or set spec.resources.device to CPU")


def test_a_step_longer_than_the_deadline_is_no_plan() -> None:
    job = changed(
        PPO, {"runPolicy.progressDeadlineSeconds": 1, "rollout.samplesPerPrompt": 256, "data.maxResponseTokens": 240}
    )
    answer = map_job(job, snapshot(job, [node("cpu")]), SETTINGS)
    assert answer.mapping is None
    assert "longer than spec.runPolicy.progressDeadlineSeconds, 1 s" in answer.message
