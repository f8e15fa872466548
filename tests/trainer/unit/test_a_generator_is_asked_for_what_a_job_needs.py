"""The arguments of vLLM's engine, by the device and the job; vLLM itself is not needed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, Qwen3MoeConfig

from rlhf_api.spec.rollout import Rollout
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.generation.vllm_arguments import BATCH_INVARIANT, engine_arguments, environment
from rlhf_trainer.run.deep_check import JobCheck
from tests.trainer.jobs import job
from tests.trainer.tiny import save_tiny, tiny_config


def arguments(
    *, on_gpu: bool, sequences: int = 8, config: PreTrainedConfig | None = None, **rollout: Any
) -> dict[str, Any]:
    return engine_arguments(
        config=config or tiny_config(),
        rollout=Rollout(**rollout),
        max_tokens=256,
        max_sequences=sequences,
        on_gpu=on_gpu,
        dtype=torch.bfloat16,
        shards=1,
        stage_layers=(),
    )


@pytest.mark.parametrize(("on_gpu", "most"), [(True, 1024), (False, 256)])
def test_so_many_responses_at_a_time_as_there_are_up_to_a_bound(on_gpu: bool, most: int) -> None:
    for asked in (1, most - 1, most, most + 1, 10 * most):
        assert arguments(on_gpu=on_gpu, sequences=asked)["max_num_seqs"] == min(asked, most)


def test_a_cpu_cache_has_room_for_as_many_responses() -> None:
    few, many = (arguments(on_gpu=False, sequences=count)["num_gpu_blocks_override"] for count in (10, 200))
    assert (few, many) == (2 * 10 + 1, 2 * 200 + 1), "256 tokens are two blocks; one block is vLLM's own"


def test_an_engine_is_eager_on_cpu_and_where_asked() -> None:
    assert not arguments(on_gpu=True)["enforce_eager"]
    assert arguments(on_gpu=True, enforce_eager=True)["enforce_eager"]
    assert arguments(on_gpu=False)["enforce_eager"]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_batches_are_invariant_on_gpus_where_asked(on_gpu: bool) -> None:
    assert BATCH_INVARIANT not in environment(on_gpu=on_gpu)
    assert (environment(Rollout(batch_invariant=True), on_gpu=on_gpu).get(BATCH_INVARIANT) == "1") is on_gpu


@pytest.mark.parametrize(("kind", "type_"), [("Int8", "int"), ("FP8", "float")])
def test_weights_are_quantised_by_channel(kind: str, type_: str) -> None:
    scheme = arguments(on_gpu=True, quantization=kind)["hf_overrides"]["quantization_config"]
    group = scheme["config_groups"]["group_0"]
    assert (group["weights"]["type"], group["weights"]["strategy"]) == (type_, "channel")
    assert (group["input_activations"]["strategy"], scheme["ignore"]) == ("token", ["lm_head"])
    assert "hf_overrides" not in arguments(on_gpu=True)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_cache_is_fp8_where_asked_and_takes_a_byte(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    plain, small = arguments(on_gpu=on_gpu), arguments(on_gpu=on_gpu, kv_cache="FP8")
    assert ("kv_cache_dtype" in plain, small["kv_cache_dtype"]) == (False, "fp8")
    if not on_gpu:
        assert 4 * small["kv_cache_memory_bytes"] == plain["kv_cache_memory_bytes"]


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"spec\.rollout\.quantization: is FP8, for which vLLM has no kernel on CPU"):
        arguments(on_gpu=False, quantization="FP8")
    with pytest.raises(ConfigError, match=r"spec\.rollout\.quantization: is Int8, but the weights of experts are not"):
        arguments(on_gpu=True, quantization="Int8", config=Qwen3MoeConfig())


LACKS = {"architecture": "x86_64", "avx512_vnni": False, "avx_vnni": False, "avx512_f": False}


def test_8_bits_are_refused_on_a_cpu_that_computes_them_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: LACKS)
    with pytest.raises(
        ConfigError, match=r"spec\.rollout\.quantization: is Int8, but vLLM computes it wrongly on a CPU without VNNI"
    ):
        arguments(on_gpu=False, quantization="Int8")
    with pytest.raises(ConfigError, match=r"spec\.rollout\.kvCache: is FP8, for which vLLM needs AVX-512 on CPU"):
        arguments(on_gpu=False, kv_cache="FP8")
    assert arguments(on_gpu=True, quantization="Int8", kv_cache="FP8")


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_job_for_another_machine_is_not_refused_for_this_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: LACKS)
    spec: dict[str, Any] = {
        "algorithm": {"name": "RLOO"},
        "models": {"actor": {"uri": f"file://{save_tiny(tmp_path / 'model', seed=3)}"}, "reward": {"uri": "hf://b"}},
        "data": {"train": {"uri": "hf://x"}, "maxPromptTokens": 32, "maxResponseTokens": 8},
        "rollout": {"samplesPerPrompt": 2, "kvCache": "FP8"},
        "training": {"totalSteps": 1, "promptBatchSize": 4},
        "resources": {"device": "CPU"},
    }
    small = job(tmp_path, "small", spec)
    told = [str(error) for error in JobCheck(small, {"small": small}, tmp_path, elsewhere=elsewhere).problems()]
    assert any("needs AVX-512" in each for each in told) is not elsewhere
