"""An observation is encoded as the chat template writes it after an answer; the answer's own ids are not touched."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_trainer.data.turns import TurnEncoder
from rlhf_trainer.errors import DataError
from tests.trainer.tiny import EXAMPLE_MODEL

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKING = PLAIN.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}"
)
"""Writes the last answer otherwise once the conversation goes on, as those of models that think do."""
WITHOUT_END = PLAIN.replace("{{ eos_token }}", "")


@pytest.fixture(params=[PLAIN, THINKING, WITHOUT_END], ids=["plain", "thinking", "without end"])
def chatting(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(str(EXAMPLE_MODEL))
    tokenizer.chat_template = request.param
    return tokenizer


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def test_what_follows_an_answer_is_the_templates(chatting: PreTrainedTokenizerBase) -> None:
    encoder = TurnEncoder(chatting, chat_template="Auto")
    said = [{"role": "tool", "content": "4"}, {"role": "user", "content": "And now?"}]
    assert text_of(chatting, encoder.observation(said)) == "\n<tool>4\n<user>And now?\n<assistant>"
    assert text_of(chatting, encoder.observation("Go on.")) == "\n<user>Go on.\n<assistant>"
    assert text_of(chatting, encoder.prompt("Go.")) == "<user>Go.\n<assistant>"


def test_a_text_stays_as_it_is_where_there_is_no_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(EXAMPLE_MODEL))
    encoder = TurnEncoder(tokenizer, chat_template="Auto")
    assert text_of(tokenizer, encoder.observation(" 4 ")) == " 4 "
    with pytest.raises(DataError, match="gave messages, but the tokenizer has no chat template"):
        encoder.observation([{"role": "tool", "content": "4"}])


def test_texts_are_no_messages_where_the_job_says_so(chatting: PreTrainedTokenizerBase) -> None:
    encoder = TurnEncoder(chatting, chat_template="Never")
    assert text_of(chatting, encoder.observation("Go on.")) == "Go on."


def test_the_answer_is_what_the_model_wrote(chatting: PreTrainedTokenizerBase) -> None:
    encoder = TurnEncoder(chatting, chat_template="Auto")
    ids = chatting("<tool_call>{}", add_special_tokens=False)["input_ids"]
    assert encoder.answer([*ids, chatting.eos_token_id]) == encoder.answer(ids) == "<tool_call>{}"


def test_half_a_character_has_tokens(chatting: PreTrainedTokenizerBase) -> None:
    r"""The model may write "\ud800" in the JSON of a call, and a tool may say it."""
    encoder = TurnEncoder(chatting, chat_template="Auto")
    assert text_of(chatting, encoder.observation("a\ud800b")) == "\n<user>a\\ud800b\n<assistant>"
