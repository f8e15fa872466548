"""Engines for tests, pieces for them, and what they write."""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoConfig

from rlhf_api.spec.rollout import Rollout
from rlhf_trainer.generation.vllm_engine import GenerationEngine
from rlhf_trainer.tensor_slice import TensorSlice

NEW_TOKENS, END, MAX_TOKENS = 16, 2, 256
KEPT: list[GenerationEngine] = []
"""An engine that is collected before it was closed destroys the process group, which a rank still needs."""


def build(
    folder: str,
    groups: list[list[int]],
    stage_layers: tuple[int, ...] = (),
    *,
    max_sequences: int = 16,
    partial: Literal["Continue", "Restart"] | None = None,
    ends: tuple[int, ...] = (END,),
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    routing: Literal["Replay"] | None = None,
    rollout: Rollout | None = None,
    draft: str | None = None,
) -> GenerationEngine:
    engine = GenerationEngine(
        folder,
        config=AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code),
        rollout=rollout or Rollout(partial=partial, routing=routing),
        max_tokens=MAX_TOKENS,
        max_sequences=max_sequences,
        ends=list(ends),
        device=torch.device("cpu"),
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        revision=None,
        tensor_groups=groups,
        stage_layers=stage_layers,
        draft=draft,
    )
    KEPT.append(engine)
    return engine


def cut(weights: dict[str, Tensor], holds: dict[str, TensorSlice]) -> Iterator[tuple[str, TensorSlice, Tensor]]:
    """Each part in up to six pieces, the last rows first."""
    for name, part in holds.items():
        height = -(-part.shape[0] // 3)
        for start in reversed(range(part.starts[0], part.stops[0], max(height, 1))):
            rows = part.cut(0, start, start + height)
            middle = (part.starts[-1] + part.stops[-1]) // 2
            last = len(part.shape) - 1
            halves = [rows.cut(last, 0, middle), rows.cut(last, middle, part.stops[-1])] if last else [rows]
            for piece in halves:
                yield name, piece, weights[name][piece.within(TensorSlice.whole(tuple(weights[name].shape)))]


def texts(engine: GenerationEngine, asked: list[list[int]], *, greedy: bool) -> list[list[int]]:
    responses = engine.generate(asked, list(range(len(asked))), max_tokens=NEW_TOKENS, greedy=greedy)
    return [list(response.tokens) for response in responses]
