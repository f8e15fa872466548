"""Conversations of a family, encoded as SFT encodes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerFast

from rlhf_trainer.chat import EndTokens, end_tokens
from rlhf_trainer.data.tokens import Column, Encoder
from tests.foreign.turns.families import Family


def ends_of(family: Family, tokenizer: PreTrainedTokenizerFast) -> EndTokens:
    return end_tokens(tokenizer, [tokenizer.convert_tokens_to_ids(each) for each in family.listed])


def encoder_of(family: Family, tokenizer: PreTrainedTokenizerFast, talk: object, tools: object = None) -> Encoder:
    return Encoder(
        Column(field="messagesKey", values=[talk]),
        tokenizer,
        chat_template="Auto",
        tools=Column(field="toolsKey", values=[tools]),
        ends=ends_of(family, tokenizer),
    )


def learned(encoder: Encoder, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The texts of a conversation that are learned; it must have no fault."""
    _, (marked,) = encoder.conversations()
    assert encoder.faults == {}
    runs = [[*run] for is_learned, run in groupby(marked, key=lambda token: token >= 0) if is_learned]
    return [text_of(tokenizer, run) for run in runs]


def fault(encoder: Encoder) -> str:
    """Why a conversation is bad; empty if it is not."""
    encoder.conversations()
    return encoder.faults[0].what if encoder.faults else ""


def text_of(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def asked(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation that begins with a question and ends with an answer."""
    return [{"role": "user", "content": "3+4="}, *messages, {"role": "assistant", "content": "It is 7."}]
