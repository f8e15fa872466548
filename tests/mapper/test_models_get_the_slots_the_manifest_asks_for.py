"""Placement: pools by name, or everything on one; and what machines or batch sizes do not allow."""

from typing import Any

import pytest
import yaml

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from rlhf_mapper.place import place
from tests.each import each_case

LAPTOP = (0,)
SERVER = (4, 4)


def ppo(**changes: Any) -> Job:
    spec: dict[str, Any] = {
        "algorithm": {"name": "PPO"},
        "models": {role: {"uri": "hf://org/model"} for role in ("actor", "critic", "reward")},
        "data": {"train": {"uri": "hf://org/data"}},
        "training": {"totalSteps": 1, "promptBatchSize": 16, "miniBatchSize": 8},
        **changes,
    }
    document = {
        "apiVersion": "rlhf.hybridflow.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {"name": "job"},
        "spec": spec,
    }
    return load(yaml.safe_dump(document))[0]


def cut(actor: dict[str, int]) -> dict[str, Any]:
    """PPO's models, of which the actor is cut in this way."""
    return {
        "actor": {"uri": "hf://org/model", "parallelism": actor},
        **{role: {"uri": "hf://org/model"} for role in ("critic", "reward")},
    }


def two_pools(left: int, right: int) -> dict[str, Any]:
    return {
        "mode": "Manual",
        "pools": [
            {"name": "left", "models": ["actor", "reference"], "slotsPerNode": left},
            {"name": "right", "models": ["critic", "reward"], "nodes": 2, "slotsPerNode": right},
        ],
    }


def test_a_model_is_cut_as_the_manifest_says() -> None:
    asked = ppo(models=cut({"pipeline": 2, "tensor": 2}), rollout={"tensorParallel": 1}, resources={"slotsPerNode": 8})
    sizes = place(asked, SERVER).sizes
    assert str(sizes["actor"]) == "2-2-2"
    assert (sizes["actor"].generation_pipeline, sizes["actor"].generation_tensor) == (1, 1)
    assert str(sizes["reference"]) == "2-2-2", "it is the actor before training"
    assert str(sizes["critic"]) == "1-1-8"


def test_a_reference_in_its_own_pool_has_its_own_sizes() -> None:
    models = cut({"pipeline": 2})
    pools = [
        {"name": "actor", "models": ["actor"], "slotsPerNode": 2},
        {"name": "others", "models": ["critic", "reference", "reward"], "slotsPerNode": 1},
    ]
    sizes = place(ppo(models=models, placement={"mode": "Manual", "pools": pools}), LAPTOP).sizes
    assert (str(sizes["actor"]), str(sizes["reference"])) == ("2-1-1", "1-1-1")


def test_a_laptop_without_a_wish_gives_one_cpu_slot() -> None:
    mapping = place(ppo(), LAPTOP)
    assert mapping.device == "CPU"
    (pool,) = mapping.pools
    assert pool.slots_per_machine == (1,)
    assert pool.models == ("actor", "critic", "reference", "reward")


def test_gpus_are_taken_where_there_are_any() -> None:
    mapping = place(ppo(resources={"nodes": 2}), SERVER)
    assert mapping.device == "GPU"
    assert mapping.pools[0].slots_per_machine == (4, 4)


def test_cpu_slots_may_be_asked_for_on_a_machine_with_gpus() -> None:
    mapping = place(ppo(resources={"device": "CPU", "slotsPerNode": 2}), SERVER)
    assert (mapping.device, mapping.pools[0].slots_per_machine) == ("CPU", (2,))


def test_manual_pools_are_taken_as_they_stand() -> None:
    left, right = place(ppo(placement=two_pools(2, 1)), LAPTOP).pools
    assert (left.name, left.models, left.slots_per_machine) == ("left", ("actor", "reference"), (2,))
    assert (right.name, right.models, right.slots_per_machine) == ("right", ("critic", "reward"), (1, 1))


REFUSED: dict[str, tuple[dict[str, Any], tuple[int, ...], str]] = {
    "no GPU here": ({"resources": {"device": "GPU"}}, LAPTOP, "job: spec.resources.device: is GPU"),
    "sizes that do not fill the pool": (
        {"models": cut({"tensor": 2, "data": 2}), "resources": {"slotsPerNode": 2}},
        SERVER,
        "p-t-d 1-2-2 takes 4 slots, but pool all has 2",
    ),
    "replicas that do not divide": (
        {"models": cut({"replicas": 3}), "resources": {"slotsPerNode": 2}},
        SERVER,
        "is 3, which does not divide the 2 data ranks",
    ),
    "experts over ranks that they do not divide": (
        {"models": cut({"expert": 2, "replicas": 2}), "resources": {"slotsPerNode": 2}},
        SERVER,
        "parallelism.expert: is 2, which does not divide the 1 ranks of a copy of a stage",
    ),
    "too many GPUs": (
        {"resources": {"nodes": 2, "slotsPerNode": 8}},
        SERVER,
        "asks for 16 GPUs, but the machines have 8",
    ),
    "a batch that does not divide": (
        {"training": {"totalSteps": 1, "promptBatchSize": 15}, "resources": {"slotsPerNode": 2}},
        LAPTOP,
        "gives 15 sequences, which do not divide by the 2 slots of pool all",
    ),
    "a mini-batch that does not divide": (
        {"training": {"totalSteps": 1, "promptBatchSize": 12, "miniBatchSize": 2}, "placement": two_pools(1, 2)},
        LAPTOP,
        "job: spec.training.miniBatchSize: gives 2 sequences, which do not divide by the 4 slots of pool right",
    ),
}


@each_case("case", REFUSED)
def test_what_cannot_be_placed_names_its_field(case: str) -> None:
    changes, inventory, sentence = REFUSED[case]
    with pytest.raises(SpecError) as refused:
        place(ppo(**changes), inventory)
    assert sentence in str(refused.value)


def test_a_cost_critic_lives_with_the_critic() -> None:
    pools = two_pools(1, 1)
    pools["pools"][0]["models"].append("cost")
    models = {role: {"uri": "hf://org/model"} for role in ("actor", "critic", "reward", "cost")}
    mapping = place(ppo(algorithm={"name": "SafeRLHF"}, models=models, placement=pools), LAPTOP)
    assert [pool.models for pool in mapping.pools] == [
        ("actor", "reference", "cost"),
        ("critic", "reward", "cost_critic"),
    ]
    alone = {"name": "SafeRLHF", "separateCostCritic": False}
    assert "cost_critic" not in ppo(algorithm=alone, models=models).models()


def test_online_dpo_keeps_the_responses_to_a_prompt_together() -> None:
    models = {role: {"uri": "hf://org/model"} for role in ("actor", "reward")}
    options = {"models": models, "rollout": {"samplesPerPrompt": 4}, "resources": {"device": "CPU", "slotsPerNode": 2}}
    uneven = {"totalSteps": 1, "promptBatchSize": 3}
    with pytest.raises(SpecError) as raised:
        place(ppo(algorithm={"name": "OnlineDPO"}, training=uneven, **options), LAPTOP)
    assert str(raised.value) == (
        "job: spec.training.promptBatchSize: is 3, which does not divide by the 2 slots of pool all; "
        "OnlineDPO keeps the responses to a prompt on one slot"
    )
    place(ppo(algorithm={"name": "GRPO"}, training=uneven, **options), LAPTOP)
