"""Each response comes with the experts that vLLM's routers chose for its tokens."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from rlhf_api.spec.rollout import Rollout
from rlhf_trainer.errors import ConfigError, EnvironmentProblem
from rlhf_trainer.expert_rows import ExpertRows
from rlhf_trainer.generation.routed_experts import ReturnedExperts
from rlhf_trainer.generation.vllm_arguments import engine_arguments, environment
from rlhf_trainer.generation.vllm_engine import GenerationEngine, Response
from rlhf_trainer.ops.kl import kl_estimate
from rlhf_trainer.ops.masks import masked_sum
from rlhf_trainer.telemetry import merge, recorder
from rlhf_trainer.training import routing
from rlhf_trainer.training.attention import use_attention
from rlhf_trainer.training.model_input import ModelInput, TokenBatch
from rlhf_trainer.training.models import LanguageModel, inner
from rlhf_trainer.training.routing import RoutingReplay
from rlhf_trainer.workers.rollout import laid_out, stack_experts
from tests.trainer.generation.conftest import RunRanks
from tests.trainer.generation.engines import build
from tests.trainer.generation.models import VOCABULARY, model_of, prompts, save_config

NEW_TOKENS = 32


def asked(kind: str) -> list[list[int]]:
    """Prompts: those of float32 share a beginning that is cached, those of bfloat16 are short and many."""
    if kind == "bfloat16":
        return torch.randint(3, VOCABULARY, (64, 12), generator=torch.Generator().manual_seed(0)).tolist()
    return prompts(0)


def loaded(folder: str, dtype: torch.dtype) -> GenerationEngine:
    engine = build(folder, [[0]], max_sequences=64, dtype=dtype, routing="Replay")
    holds, weights = engine.held_shards(), dict(model_of(folder, 1).named_parameters())
    pieces = ((name, part, weights[name].detach().to(dtype).view(part.shape)) for name, part in holds.items())
    engine.load_weights(pieces, holds)
    engine.wake_cache()
    return engine


def generate(folder: str) -> dict[str, list[Response]]:
    engine, found = loaded(folder, torch.float32), {}
    texts = asked("float32")
    seeds = list(range(len(texts)))
    vllm = engine._engine
    found["float32"] = engine.generate(texts, seeds, max_tokens=NEW_TOKENS)
    found["cached"] = engine.generate(texts, seeds, max_tokens=NEW_TOKENS)
    found["alone"] = []
    for text, seed in zip(texts, seeds, strict=True):
        vllm.reset_prefix_cache()
        found["alone"] += engine.generate([text], [seed], max_tokens=NEW_TOKENS)
    for number, text in enumerate(texts):
        engine.begin(number, text, seeds[number], max_tokens=NEW_TOKENS, greedy=False)
    steps, ended = 0, dict[int, Response]()
    while engine.is_busy:
        ended.update(engine.step())
        steps += 1
        if steps % 7 == 0:
            vllm.reset_prefix_cache(reset_running_requests=True)  # it preempts them
    found["preempted"] = [ended[number] for number in range(len(texts))]
    held = engine.bytes_held()
    assert engine.sleep() == held, "the experts' buffer is freed with the cache"
    found["bfloat16"] = loaded(folder, torch.bfloat16).generate(
        asked("bfloat16"), list(range(64)), max_tokens=NEW_TOKENS
    )
    return found


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory, vllm_ranks: RunRanks) -> tuple[str, dict[str, list[Response]]]:
    folder = save_config(tmp_path_factory.mktemp("mixture"), "qwen3 moe")
    return folder, vllm_ranks(1, generate, folder)[0]


def test_experts_are_those_of_the_trainers_routers(generated: Any) -> None:
    folder, responses = generated
    model, chosen = model_of(folder, 1), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda *given: chosen.append(given[2][2]))
    rows = ExpertRows.of(model.config)
    for prompt, response in zip(asked("float32"), responses["float32"], strict=True):
        chosen.clear()
        with torch.no_grad():
            model(torch.tensor([[*prompt, *response.tokens[:-1]]]))
        for number, expected in enumerate(chosen):
            assert torch.equal(rows.decode(response.experts, number).sort(1).values, expected.sort(1).values)


@pytest.mark.parametrize("kind", ["cached", "alone", "preempted"])
def test_caching_and_preemption_change_no_experts(generated: Any, kind: str) -> None:
    _, responses = generated
    for one, other in zip(responses["float32"], responses[kind], strict=True):
        assert one.tokens == other.tokens
        assert torch.equal(one.experts, other.experts)


def test_replay_brings_trainer_and_generator_together(generated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16: tokens with other experts and the KL without replay, and with it."""
    monkeypatch.setattr(routing, "sum_over_ranks", list)  # this process is the only one
    folder, every = generated
    responses, texts = every["bfloat16"], asked("bfloat16")
    model = LanguageModel(model_of(folder, 1).bfloat16()).eval()
    config: Any = inner(model).config
    use_attention(inner(model), "SDPA", device=torch.device("cpu"), dtype=torch.bfloat16)
    replay, rows, used = RoutingReplay(model), ExpertRows.of(config), list[Tensor]()
    for layer in inner(model).model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, given: used.append(given[1].sort(1).values))
    fields = laid_out(texts, responses, width=12 + NEW_TOKENS, pad_token=0)
    experts = stack_experts(responses, width=12 + NEW_TOKENS, size=rows.width)
    mask, generators = fields["response_mask"], fields["rollout_log_probs"]
    kl, differ = [], []
    recorder.drain()
    for given in (None, experts):
        lengths = fields["attention_mask"].sum(1).long()
        text = ModelInput.of([TokenBatch(tokens=fields["tokens"], lengths=lengths, read=mask, experts=given)])
        used.clear()
        with torch.no_grad(), replay.measured(limit=0.2):
            log_probs = model(text.tokens, text).log_probs
        kl.append(float(masked_sum(kl_estimate(generators, log_probs, estimator="K3"), mask) / mask.sum()))
        packed = torch.cat([response.experts for response in responses])
        inputs = (fields["attention_mask"].cumsum(1) < lengths[:, None])[fields["attention_mask"] > 0]  # not the last
        pairs = [rows.decode(packed, number).sort(1).values != each[inputs] for number, each in enumerate(used)]
        differ.append(float(torch.stack(pairs).any(2).float().mean()))
    share = merge([recorder.drain()])["routing/differs"]
    sys.stdout.write(f"other experts {differ}, KL {kl}, measured {share}\n")
    assert 0.0 < differ[0] < 0.2
    assert differ[1] == 0.0
    assert 0.0 < share < 0.2
    assert kl[1] < 0.5 * kl[0]


CONFIG = SimpleNamespace(num_hidden_layers=2, num_experts_per_tok=3, num_experts=300)


def test_what_vllm_returns_on_gpus_is_encoded_alike() -> None:
    """Only its type and shape, by vLLM's source: no GPU was there."""
    rows, given = ExpertRows.of(CONFIG), np.arange(24, dtype=np.uint16).reshape(4, 2, 3) + 270
    found = ReturnedExperts(rows).take("1", SimpleNamespace(routed_experts=given), tokens=4)
    assert found.shape == (4, rows.width) == (4, 12)
    assert rows.decode(found, 1).tolist() == given[:, 1].tolist()


@pytest.mark.parametrize("given", [None, np.zeros((3, 2, 3), dtype=np.uint8)], ids=["none", "of fewer tokens"])
def test_a_generator_without_experts_is_refused(given: Any) -> None:
    with pytest.raises(EnvironmentProblem, match=r"^vLLM returns .*spec\.rollout\.routing: Recompute does without"):
        ReturnedExperts(ExpertRows.of(CONFIG)).take("1", SimpleNamespace(routed_experts=given), tokens=4)


def test_vllm_is_asked_for_experts_on_gpus_only(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(save_config(tmp_path, "qwen3 moe"))
    options: dict[str, Any] = {
        "rollout": Rollout(routing="Replay"),
        "max_tokens": 64,
        "max_sequences": 2,
        "dtype": torch.float32,
    }
    options |= {"config": config, "shards": 1}
    asks = [
        engine_arguments(**options, on_gpu=on_gpu, stage_layers=()).get("enable_return_routed_experts")
        for on_gpu in (True, False)
    ]
    assert asks == [True, None]
    assert "VLLM_USE_V2_MODEL_RUNNER" in environment(options["rollout"], on_gpu=True)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in environment(options["rollout"], on_gpu=False)
    with pytest.raises(ConfigError, match="a pipeline stage of a generator knows its experts only"):
        engine_arguments(**options, on_gpu=True, stage_layers=(1, 2))
