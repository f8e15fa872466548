"""Responses drawn with drafts and without, and how unlike two samples are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf_api.spec.rollout import Rollout, Speculation
from rlhf_trainer.generation.vllm_engine import GenerationEngine
from rlhf_trainer.tensor_slice import TensorSlice
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


def save_draft(folder: Path) -> str:
    """A model of the same vocabulary with other heads and nearly the same opinions."""
    save_config(folder, "llama")
    model = model_of(str(folder), SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "mlp" in name:
                weight.mul_(0.9)
    model.save_pretrained(folder)
    return str(folder)


def engine_of(
    folder: str,
    speculation: Speculation | None,
    draft: str | None = None,
    groups: tuple[tuple[int, ...], ...] = ((0,),),
) -> GenerationEngine:
    rollout = Rollout(temperature=TEMPERATURE, top_k=TOP_K, speculation=speculation)
    engine = build(folder, [*map(list, groups)], max_sequences=AT_ONCE, rollout=rollout, draft=draft)
    load(engine, folder, SEED)
    return engine


def load(engine: GenerationEngine, folder: str, seed: int) -> None:
    holds, weights = engine.held_shards(), weights_of(folder, seed)
    pieces = (
        (name, part, weights[name][part.within(TensorSlice.whole(tuple(weights[name].shape)))])
        for name, part in holds.items()
    )
    engine.load_weights(pieces, holds)
    engine.wake_cache()


def draw(folder: str, speculation: Speculation | None, count: int, draft: str | None = None) -> Drawn:
    """Draw `count` responses to a prompt that ends with what the model likes to repeat, so that drafts are good."""
    engine = engine_of(folder, speculation, draft)
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
