"""What the mapper counts of a model with an adapter, on real shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rlhf_api.names import Role
from rlhf_api.spec.lora import Lora
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.auto_map import auto_map
from rlhf_mapper.coefficients import TRAINER
from rlhf_mapper.config_file import shape_of
from rlhf_mapper.hardware import Cluster
from rlhf_mapper.mapping import DeviceMapping
from rlhf_mapper.simulate import memory
from rlhf_mapper.workload import workload_of
from rlhf_planning.checkpoint_size import checkpoint_bytes
from tests.each import each_case
from tests.mapper.oracles.testbed import MODELS
from tests.mapper.planned_jobs import cluster_of, job_of, shapes_of
from tests.trainer.families import FAMILIES

LORA: dict[str, object] = {"lora": {}}


def test_an_adapters_optimizer_is_less_than_three_percent() -> None:
    """Rank 16 of all linear layers of Llama-7B: 40.0 million parameters, as PEFT counts them."""
    model = MODELS["7B"]
    trained = model.trained_parameters(Lora())
    assert trained == 32 * 16 * (4 * (4096 + 4096) + 3 * (4096 + 11008)) == 39_976_960
    whole, adapted = (
        memory.states(model, TRAINER, trains=True, trained_share=share) for share in (1.0, trained / model.parameters)
    )
    assert whole["optimizer"] == 8 * model.parameters
    assert adapted["optimizer"] == pytest.approx(8 * trained)
    assert adapted["optimizer"] <= 0.03 * whole["optimizer"]
    assert adapted["weights"] == pytest.approx(2 * model.parameters + 4 * trained)


UNKNOWN = ("Qwen2-MoE", "DeepSeek-V3")
"""Families with shared experts and a layer without experts, which the mapper does not know."""


@each_case("family", [name for name in FAMILIES if name not in ("GPT-2", *UNKNOWN)])
@pytest.mark.slow
def test_parameters_are_as_many_as_peft_trains(family: str) -> None:
    """With all targets, with each of those that a model of the family has, and with several."""
    config = FAMILIES[family]
    shape = shape_of(config.to_json_string(use_diff=False), "actor")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = (name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, torch.nn.Linear))
    names = sorted({*linear} - {"lm_head"})
    for targets in ((), tuple(names[1:]), *((name,) for name in names)):
        own = LoraConfig(r=8, target_modules=list(targets or names), task_type="CAUSAL_LM")
        with torch.device("meta"):
            adapted = get_peft_model(AutoModelForCausalLM.from_config(config), own)
        expected = sum(each.numel() for each in adapted.parameters() if each.requires_grad)
        assert shape.trained_parameters(Lora(rank=8, targets=targets)) == expected > 0, targets


def test_a_scorers_head_is_trained_too() -> None:
    head = replace(MODELS["7B"], scores=True)
    assert head.trained_parameters(Lora()) == MODELS["7B"].trained_parameters(Lora()) + head.hidden


def parts(mapping: object, role: Role) -> Mapping[str, float]:
    assert isinstance(mapping, DeviceMapping)
    assert mapping.prediction
    return mapping.prediction.models[role].memory["training"]


def test_ppo_with_adapters_needs_fewer_gpus_and_no_reference() -> None:
    """PPO of 7B models on one GPU of 80 GB: a whole one has 12 bytes a parameter, which are 81 GB."""
    whole, adapted = job_of("PPO"), job_of("PPO", {"actor": LORA, "critic": LORA})
    assert "reference" in whole.models()
    assert "reference" not in adapted.models()
    (nodes,) = cluster_of(("a100-80g", 1, 1)).groups
    cluster = Cluster((replace(nodes, host_memory=1e9),))
    found = [auto_map(each, cluster, shapes_of(each), device="GPU") for each in (whole, adapted)]
    assert [isinstance(each, DeviceMapping) for each in found] == [False, True]
    model: Architecture = MODELS["7B"]
    actor = parts(found[1], "actor")
    assert actor["optimizer"] == pytest.approx(8 * model.trained_parameters(Lora()))
    assert actor["gradients"] <= 4 * model.trained_parameters(Lora())


def test_the_actor_reads_what_its_reference_would() -> None:
    whole, adapted = job_of("PPO"), job_of("PPO", {"actor": LORA})
    reads = [{role: work.read for role, work in workload_of(each).work.items()} for each in (whole, adapted)]
    assert reads[1]["actor"] == reads[0]["actor"] + reads[0]["reference"]
    pairs = [workload_of(job_of("DPO", models)).work["actor"].read for models in ({}, {"actor": LORA})]
    assert pairs == [0.0, 2 * 64.0]


def test_a_checkpoint_holds_adapters_only() -> None:
    job = job_of("PPO", {"actor": LORA, "critic": LORA})
    shapes = shapes_of(job)
    trained = sum(shapes[role].trained_parameters(Lora()) for role in ("actor", "critic"))
    assert checkpoint_bytes(job, shapes) == 12 * trained
    assert checkpoint_bytes(job_of("PPO"), shapes_of(job_of("PPO"))) > 100 * checkpoint_bytes(job, shapes)
