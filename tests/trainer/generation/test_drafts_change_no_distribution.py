"""Speculative decoding draws from the same distribution, and each response is still a function of its own seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rlhf_api.spec.rollout import Rollout, Speculation
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.generation.vllm_arguments import engine_arguments
from rlhf_trainer.generation.vllm_engine import GenerationEngine
from tests.trainer.generation.conftest import RunRanks
from tests.trainer.generation.engines import build
from tests.trainer.generation.models import model_of, save_config, weights_of

PROMPT, SEED = [5, 6, 7, 8] * 5, 1
TEMPERATURE, TOP_K = 0.7, 8
NEW_TOKENS, SAMPLES, AT_ONCE = 4, 20_000, 256
FEWEST = 10
"""Least number of samples of a cell in a chi-square test; rarer responses share a cell."""


@dataclass(frozen=True)
class Drawn:
    """Responses to one prompt."""

    prompt: list[int]
    responses: list[tuple[int, ...]]
    alone: list[tuple[int, ...]]
    """The first ones again, each generated without others."""
    error: float
    """Largest difference of a log-probability from that of the sampling distribution by transformers."""
    drafts: tuple[int, int]


def engine_of(folder: str, speculation: Speculation | None) -> GenerationEngine:
    rollout = Rollout(temperature=TEMPERATURE, top_k=TOP_K, speculation=speculation)
    engine = build(folder, [[0]], max_sequences=AT_ONCE, rollout=rollout)
    holds, weights = engine.held_shards(), weights_of(folder, SEED)
    engine.load_weights(((name, part, weights[name]) for name, part in holds.items()), holds)
    engine.wake_cache()
    return engine


def draw(folder: str, speculation: Speculation | None, count: int) -> Drawn:
    """Draw `count` responses to a prompt that ends with what the model likes to repeat, so that drafts are good."""
    engine = engine_of(folder, speculation)
    prompt = PROMPT + list(engine.generate([PROMPT], [0], max_tokens=6, greedy=True)[0].tokens)
    engine.drafts()
    drawn = engine.generate([prompt] * count, list(range(count)), max_tokens=NEW_TOKENS)
    drafts = engine.drafts()
    alone = [engine.generate([prompt], [seed], max_tokens=NEW_TOKENS)[0] for seed in range(12)]
    model, error = model_of(folder, SEED), 0.0
    for response in drawn[:200]:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + list(response.tokens)])).logits[0, len(prompt) - 1 : -1]
        scaled = logits / TEMPERATURE
        scaled[scaled < scaled.topk(TOP_K).values[:, -1:]] = float("-inf")
        expected = scaled.log_softmax(-1).gather(1, torch.tensor(response.tokens)[:, None])[:, 0]
        error = max(error, float((expected - torch.tensor(response.log_probs)).abs().max()))
    engine.close()
    tokens = [tuple(response.tokens) for response in drawn]
    return Drawn(prompt, tokens, [tuple(response.tokens) for response in alone], error, drafts)


def p_value(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> float:
    """Probability of such a difference between two samples of one distribution, by the chi-square test."""
    counts, others = Counter(one), Counter(other)
    often = [each for each in counts | others if counts[each] + others[each] >= 2 * FEWEST]
    cells = [(counts[each], others[each]) for each in often]
    cells.append((len(one) - sum(a for a, _ in cells), len(other) - sum(b for _, b in cells)))
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells if a + b)
    freedom = torch.tensor(float(len(cells) - 1))
    return float(torch.special.gammaincc(freedom / 2, torch.tensor(float(statistic)) / 2))


@pytest.mark.slow
def test_drafts_change_no_distribution(tmp_path: Path, vllm_ranks: RunRanks) -> None:
    folder = save_config(tmp_path / "model", "llama")
    (plain,) = vllm_ranks(1, draw, folder, None, SAMPLES)
    (drafted,) = vllm_ranks(1, draw, folder, Speculation(method="NGram", tokens=3), SAMPLES)
    accepted, offered = drafted.drafts
    assert plain.drafts == (0, 0)
    assert 0.05 * offered < accepted < offered
    assert drafted.prompt == plain.prompt
    assert p_value(plain.responses, drafted.responses) > 0.001
    assert drafted.error < 1e-4
    assert drafted.alone == drafted.responses[:12]
    assert drafted.responses != plain.responses


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
        (Rollout(speculation=Speculation(method="Suffix")), (), "the package arctic-inference is missing"),
    ],
)
def test_what_cannot_draft_is_refused(tmp_path: Path, rollout: Rollout, stages: tuple[int, ...], sentence: str) -> None:
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
