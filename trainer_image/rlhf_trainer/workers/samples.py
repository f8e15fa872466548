"""The responses of a batch as texts, for reward functions, services and evaluation functions."""

import itertools
import json
from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_trainer.rewards.sample import Sample
from rlhf_trainer.training.branches import branches_of
from rlhf_trainer.types import PARENTS, Batch

SAMPLE_FIELDS = ("tokens", "attention_mask", "response_mask", "finished", "valid")
RAW_PROMPTS, EPISODES = "raw_prompts", "episodes"
"""Batch fields of an agent's job, JSON as uint8 [B, C]: prompts as written in the file, and `EndedEpisode.facts`."""
COLUMNS = ("columns",)
"""Batch field with the data's further columns; only in batches of a job that names such columns."""
TURN_FIELDS = ("turn_rewards", "played")
"""Fields of episodes; only in batches of `episodes.EpisodeResponder` and `agents.AgentResponder`."""


def real_rows(batch: Batch) -> Tensor:
    """Return the indices of this rank's rows that are not padding: int64 [real]."""
    return batch["valid"].nonzero()[:, 0]


def samples_of(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Return this rank's rows that are not padding as samples, with prompt and response decoded to text."""
    return [sample_of(batch, row, tokenizer) for row in real_rows(batch).tolist()]


@lru_cache(maxsize=4)
def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    return frozenset(tokenizer.added_tokens_decoder)


def sample_of(batch: Batch, row: int, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """Decode one of this rank's rows; an episode's response is its last answer, and its prompt all text before.

    In a row that is a tree, the prompt is all text before the answer in the answer's branch.
    """
    places = branches_of(batch, row)[-1]
    written, tokens = batch["response_mask"][row, places] > 0, batch["tokens"][row, places]
    between = ~written & (written.cumsum(0) > 0)
    start = int(between.nonzero().max()) + 1 if between.any() else 0
    response = written & (torch.arange(len(written)) >= start)
    prompt, finished = ~response, bool(batch["finished"][row])
    answer = tokens[response].tolist()
    if finished and answer and answer[-1] in _added_tokens(tokenizer):
        answer.pop()  # an end token that is not special would be decoded as text
    return Sample(
        step=batch.step,
        row=batch.start + row,
        prompt=tokenizer.decode(tokens[prompt], skip_special_tokens=True),
        response=tokenizer.decode(answer, skip_special_tokens=True),
        finished=finished,
        columns=from_bytes(batch["columns"][row]) if "columns" in batch.fields else {},
    )


def turns_of(batch: Batch, row: int, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the answers and observations after the prompt of one of this rank's episodes, in order, as mappings.

    text: decoded tokens; written: whether the model wrote the text; reward: the environment's reward for the text. With
    an agent also after: index of the turn that the text continues, -1 for the prompt, None if no token is before it.
    """
    written, end = (batch["response_mask"][row] > 0).tolist(), int(batch["attention_mask"][row].sum())
    facts = from_bytes(batch[EPISODES][row]) if EPISODES in batch.fields else {}
    start = facts.get("prompt_tokens", written.index(True))
    is_tree = PARENTS in batch.fields
    parents = batch[PARENTS][row].tolist() if is_tree else range(-1, end - 1)
    forks = [place for place in range(start, end) if parents[place] != place - 1]
    changes = {place for place in range(start + 1, end) if written[place] != written[place - 1]}
    left = {parents[place] + 1 for place in forks if parents[place] >= start}
    cuts = sorted({start, end, *changes, *forks, *left})
    return [
        {
            "text": tokenizer.decode(batch["tokens"][row, one:other], skip_special_tokens=True),
            "written": written[one],
            "reward": float(batch["turn_rewards"][row, one:other].sum()),
            **({"after": bisect(cuts, parents[one]) - 1 if parents[one] >= 0 else None} if is_tree else {}),
        }
        for one, other in itertools.pairwise(cuts)
    ]


def as_bytes(rows: Sequence[Mapping[str, Any]]) -> Tensor:
    """Encode one mapping a row as JSON bytes, uint8 [B, C], filled up with zeros on the right.

    Raises ValueError for a value that is no text, number, boolean, or list or mapping of them.
    """
    texts = [json.dumps(row, default=_refuse).encode() for row in rows]
    width = max(map(len, texts), default=0)
    joined = bytearray(b"".join(text.ljust(width, b"\0") for text in texts))
    return torch.frombuffer(joined, dtype=torch.uint8).view(-1, width) if width else torch.zeros(0, 0).byte()


def from_bytes(row: Tensor) -> dict[str, Any]:
    """Decode one row of `as_bytes`, uint8 [C], to its mapping."""
    found: dict[str, Any] = json.loads(row.numpy().tobytes().rstrip(b"\0"))
    return found


def _refuse(value: object) -> None:
    expected = "text, numbers, true or false, and lists and mappings of these"
    raise ValueError(f"there is a value of type {type(value).__name__}, expected {expected}")
