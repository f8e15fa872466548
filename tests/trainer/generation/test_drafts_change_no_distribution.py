"""Speculative decoding draws from the same distribution, and each response is still a function of its own seed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoConfig

from rlhf_api.spec.rollout import Rollout, Speculation
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.generation.vllm_arguments import engine_arguments
from tests.trainer.generation.conftest import RunRanks
from tests.trainer.generation.drafts import (
    NEW_TOKENS,
    PROMPT,
    SAMPLES,
    SEED,
    draw,
    engine_of,
    load,
    p_value,
    save_draft,
)
from tests.trainer.generation.models import model_of, save_config


@pytest.mark.slow
def test_drafts_change_no_distribution(tmp_path: Path, vllm_ranks: RunRanks) -> None:
    folder, draft = save_config(tmp_path / "model", "llama"), save_draft(tmp_path / "draft")
    (plain,) = vllm_ranks(1, draw, folder, None, SAMPLES)
    assert plain.drafts == (0, 0)
    cases: list[tuple[Speculation, str | None]] = [(Speculation(method="NGram", tokens=3), None)]
    cases.append((Speculation(method="Draft", draft=f"file://{draft}", tokens=3), draft))
    if find_spec("arctic_inference"):
        cases.append((Speculation(method="Suffix", tokens=3), None))
    for speculation, model in cases:
        (drafted,) = vllm_ranks(1, draw, folder, speculation, SAMPLES, model)
        accepted, offered = drafted.drafts
        chance = p_value(plain.responses, drafted.responses)
        assert 0.05 * offered < accepted < offered
        assert drafted.prompt == plain.prompt
        assert chance > 0.001
        assert drafted.error < 1e-4
        assert drafted.alone == drafted.responses[:12]
        assert drafted.responses != plain.responses


def draw_beside_a_long_row(folder: str, speculation: Speculation, draft: str | None) -> list[bool]:
    """Whether short responses are the same beside one that reaches the model's greatest length."""
    engine = engine_of(folder, speculation, draft)
    prompts = [PROMPT] * 6 + [PROMPT * 12] + [[first, *range(40, 79)] for first in range(100, 220)]  # fill a step
    together = engine.generate(prompts, list(range(len(prompts))), max_tokens=16)
    alone = [engine.generate([prompt], [seed], max_tokens=16)[0] for seed, prompt in enumerate(prompts[:12])]
    engine.close()
    return [list(one.tokens) == list(other.tokens) for one, other in zip(together, alone, strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["NGram", "Draft"])
def test_a_long_row_changes_no_other(tmp_path: Path, vllm_ranks: RunRanks, method: Literal["NGram", "Draft"]) -> None:
    folder = save_config(tmp_path / "model", "llama")
    draft = save_draft(tmp_path / "draft") if method == "Draft" else None
    (same,) = vllm_ranks(1, draw_beside_a_long_row, folder, Speculation(method=method, tokens=3), draft)
    assert all(same)


def draft_with_new_weights(folder: str, draft: str, groups: tuple[tuple[int, ...], ...]) -> list[Any]:
    """Accepted shares by equal weights, by others, by those again, and of a draft model lost and restored."""
    engine = engine_of(folder, Speculation(method="Draft", tokens=3), draft, groups)
    shares, texts = [], []
    for seed in (SEED, SEED + 1, SEED):
        load(engine, folder, seed)
        texts.append(list(engine.generate([PROMPT], [0], max_tokens=NEW_TOKENS * 5, greedy=True)[0].tokens))
        accepted, offered = engine.drafts()
        shares.append(accepted / offered)
    asleep, _ = engine.sleep(), engine._call("keep_draft")
    held = engine.bytes_held()
    for live, _ in engine._engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker._draft:
        live.zero_()
    load(engine, folder, SEED)
    engine.generate([PROMPT], [0], max_tokens=NEW_TOKENS * 5, greedy=True)
    accepted, offered = engine.drafts()
    engine._call("restore_draft")
    engine.generate([PROMPT], [1], max_tokens=NEW_TOKENS * 5, greedy=True)
    restored = engine.drafts()
    engine.close()
    return [shares, texts, accepted / offered, restored[0] / restored[1], held, asleep]


@pytest.mark.parametrize(
    "groups", [pytest.param(((0,),), id="one rank"), pytest.param(((0, 1),), id="two shards", marks=pytest.mark.slow)]
)
def test_a_model_drafts_for_others(tmp_path: Path, vllm_ranks: RunRanks, groups: tuple[tuple[int, ...], ...]) -> None:
    folder, draft = save_config(tmp_path / "model", "llama"), save_config(tmp_path / "draft", "llama")
    model_of(draft, SEED).save_pretrained(draft)
    found = vllm_ranks(len(groups[0]), draft_with_new_weights, folder, draft, groups)
    for shares, texts, lost, restored, held, asleep in found:
        assert shares[0] == shares[2] > 0.9 > 0.3 > shares[1]
        assert texts[0] == texts[2] != texts[1]
        assert lost < 0.3
        assert restored > 0.9
        assert 0 < held < asleep


def test_a_difference_of_a_few_percent_would_be_seen() -> None:
    generator = torch.Generator().manual_seed(0)

    def sample(*weights: float) -> list[tuple[int, ...]]:
        drawn = torch.multinomial(torch.tensor(weights), SAMPLES, replacement=True, generator=generator)
        return [(token,) for token in drawn.tolist()]

    assert p_value(sample(0.5, 0.3, 0.2), sample(0.5, 0.3, 0.2)) > 0.001
    assert p_value(sample(0.5, 0.3, 0.2), sample(0.48, 0.32, 0.2)) < 0.001


@pytest.mark.parametrize(
    ("rollout", "stages", "sentence"),
    [
        (Rollout(speculation=Speculation(method="NGram"), routing="Replay"), (), "rollout.routing is Replay"),
        (Rollout(speculation=Speculation(method="NGram")), (2, 1), "the generator has pipeline stages"),
        (
            Rollout(speculation=Speculation(method="Suffix")),
            (),
            "is Suffix, which needs the package of the extra suffix",
        ),
    ],
)
def test_what_cannot_draft_is_refused(
    tmp_path: Path, rollout: Rollout, stages: tuple[int, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_trainer.generation.vllm_arguments.find_spec", lambda _: None)
    config = AutoConfig.from_pretrained(save_config(tmp_path, "llama"))
    sizes: dict[str, Any] = {"max_tokens": 64, "max_sequences": 8, "shards": 1, "stage_layers": stages}
    with pytest.raises(ConfigError, match=sentence):
        engine_arguments(config=config, rollout=rollout, on_gpu=False, dtype=torch.float32, **sizes)


def test_no_draft_is_cut_by_the_tokens_of_a_step(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(save_config(tmp_path, "llama"))
    rollout = Rollout(speculation=Speculation(method="NGram", tokens=32))
    sizes: dict[str, Any] = {"max_tokens": 64, "max_sequences": 256, "shards": 1, "stage_layers": ()}
    made = engine_arguments(config=config, rollout=rollout, on_gpu=False, dtype=torch.float32, **sizes)
    assert made["max_num_batched_tokens"] >= 256 * 33 + 64
    assert made["speculative_config"]["num_speculative_tokens"] == 32


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_step_leaves_room_for_a_token_of_each_row(tmp_path: Path, on_gpu: bool) -> None:
    folder = save_config(tmp_path, "llama")
    sizes: dict[str, Any] = {"max_tokens": 64, "max_sequences": 100, "stage_layers": (), "dtype": torch.float32}
    given = {"config": AutoConfig.from_pretrained(folder), "on_gpu": on_gpu, "draft": folder, **sizes}
    rollout = Rollout(speculation=Speculation(method="Draft", draft=f"file://{folder}"))
    made = engine_arguments(rollout=rollout, shards=2, **given)
    assert made["max_num_batched_tokens"] - made["max_num_scheduled_tokens"] == made["max_num_seqs"] == 100
    assert made["speculative_config"]["draft_tensor_parallel_size"] == 2
    with pytest.raises(ConfigError, match=r"speculation\.draft: has 4 attention heads, which 3 tensor-parallel shards"):
        engine_arguments(rollout=rollout, shards=3, **given)
