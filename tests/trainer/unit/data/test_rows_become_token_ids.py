"""Prompts and responses become the ids that the model sees, with a chat template and without."""

import pytest
from transformers import PreTrainedTokenizerFast

from rlhf_trainer.data.tokens import ChatTemplate, Column, Ids, encode_prompts, encode_responses
from rlhf_trainer.errors import ConfigError, DataError

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be kind"}
REPLY = {"role": "assistant", "content": "hello"}
Prompt = str | list[dict[str, str]]


def prompt_tokens(prompt: Prompt, tokenizer: PreTrainedTokenizerFast, *, chat_template: ChatTemplate) -> Ids:
    """Token ids of one prompt."""
    return encode_prompts(Column(field="prompt", values=[prompt]), tokenizer, chat_template=chat_template)[0]


def pair_tokens(prompt: Prompt, response: object, tokenizer: PreTrainedTokenizerFast) -> tuple[Ids, Ids]:
    """(prompt ids, response ids) of one row."""
    prompts, responses = Column(field="prompt", values=[prompt]), Column(field="response", values=[response])
    ids = encode_prompts(prompts, tokenizer, chat_template="Auto")
    return ids[0], encode_responses(prompts, ids, responses, tokenizer, chat_template="Auto")[0]


PROMPTS: dict[str, tuple[Prompt, bool, ChatTemplate, str]] = {
    "a text without a template stands as it is": ("Human: hi", False, "Auto", "Human: hi"),
    "a text is the user's message": ("hi", True, "Auto", "<|user|>hi</s>\n<|assistant|>"),
    "a text is left alone if asked": ("hi", True, "Never", "hi"),
    "messages go through the template": (
        [SYSTEM, USER],
        True,
        "Auto",
        "<|system|>be kind</s>\n<|user|>hi</s>\n<|assistant|>",
    ),
    "messages need the template even if texts do not": ([USER], True, "Never", "<|user|>hi</s>\n<|assistant|>"),
    "keys of other rows are not there": (
        [{**USER, "name": None}],  # type: ignore[dict-item]
        True,
        "Auto",
        "<|user|>hi</s>\n<|assistant|>",
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt(name: str, plain: PreTrainedTokenizerFast, chat: PreTrainedTokenizerFast) -> None:
    prompt, has_template, mode, text = PROMPTS[name]
    tokenizer = chat if has_template else plain
    ids = prompt_tokens(prompt, tokenizer, chat_template=mode)
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


RESPONSES: dict[str, tuple[object, bool]] = {
    "a text": ("hello", False),
    "a text after a template": ("hello", True),
    "a message": (REPLY, True),
    "a list with one message": ([REPLY], True),
    "the conversation with one message of the assistant": ([USER, REPLY], True),
    "a message without a template": (REPLY, False),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_is_the_text_and_the_end(
    name: str, plain: PreTrainedTokenizerFast, chat: PreTrainedTokenizerFast
) -> None:
    response, has_template = RESPONSES[name]
    tokenizer = chat if has_template else plain
    prompt, ids = pair_tokens("hi", response, tokenizer)
    assert tokenizer.decode(ids) == "hello</s>"
    assert prompt == prompt_tokens("hi", tokenizer, chat_template="Auto")
    assert ids[-1] == tokenizer.eos_token_id


def test_an_end_that_is_written_is_not_doubled(plain: PreTrainedTokenizerFast) -> None:
    _, ids = pair_tokens("hi", "hello</s>", plain)
    assert plain.decode(ids) == "hello</s>"


def test_an_empty_response_is_the_end(plain: PreTrainedTokenizerFast, chat: PreTrainedTokenizerFast) -> None:
    for tokenizer in (plain, chat):
        assert pair_tokens("hi", "", tokenizer)[1] == [tokenizer.eos_token_id]


def test_a_template_without_the_end_gets_one(chat: PreTrainedTokenizerFast) -> None:
    chat.chat_template = str(chat.chat_template).replace("</s>", "<pad>")
    _, ids = pair_tokens("hi", "hello", chat)
    assert chat.decode(ids) == "hello<pad>\n</s>"


def test_a_template_that_prompts_otherwise_than_it_records(chat: PreTrainedTokenizerFast) -> None:
    chat.chat_template = str(chat.chat_template).replace("<|assistant|>", "<|assistant|>think: ")
    prompts, responses = (Column(field="x", values=values) for values in (["hi", "ho"], ["hello", "hey"]))
    ids = encode_prompts(prompts, chat, chat_template="Auto")
    assert [chat.decode(row) for row in ids] == [f"<|user|>{text}</s>\n<|assistant|>think: " for text in ("hi", "ho")]
    encoded = encode_responses(prompts, ids, responses, chat, chat_template="Auto")
    assert [chat.decode(row) for row in encoded] == ["hello</s>", "hey</s>"]


def encode(prompts: Column, responses: Column, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode_prompts(prompts, tokenizer, chat_template="Auto")
    encode_responses(prompts, ids, responses, tokenizer, chat_template="Auto")


FAULTS: dict[str, tuple[object, object, str]] = {
    "nothing": (None, "x", "promptKey: row 8 (counted from 0) holds nothing, not a text or a list of messages"),
    "a number": (3, "x", "promptKey: row 8 (counted from 0) holds a value of type int, not a text or a list of"),
    "no messages": ([], "x", "promptKey: row 8 (counted from 0) holds nothing, not a text or a list of messages"),
    "a list of texts": (["a"], "x", "promptKey: row 8 (counted from 0) holds a value of type str, not a text or a"),
    "a message without content": (
        [{"role": "user", "content": None}],
        "x",
        "promptKey: row 8 (counted from 0) has a message whose 'role' or 'content' is not a text",
    ),
    "a conversation that the template refuses": (
        [{"role": "nobody", "content": "a"}],
        "x",
        "promptKey: row 8 (counted from 0) is refused by the tokenizer's chat template: who is nobody?",
    ),
    "no response": ("a", None, "chosenKey: row 8 (counted from 0) holds nothing, not a text or a message"),
    "two responses": (
        "a",
        [REPLY, REPLY],
        "chosenKey: row 8 (counted from 0) holds 2 messages of the assistant instead of one",
    ),
    "a response of the user": (
        "a",
        USER,
        "chosenKey: row 8 (counted from 0) holds 0 messages of the assistant instead of one",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_value_that_cannot_be_encoded_is_named(name: str, chat: PreTrainedTokenizerFast) -> None:
    prompt, response, sentence = FAULTS[name]
    guard = "{% if messages[0].role == 'nobody' %}{{ raise_exception('who is nobody?') }}{% endif %}"
    chat.chat_template = guard + str(chat.chat_template)
    prompts = Column(field="promptKey", values=["fine", prompt], first_row=7)
    responses = Column(field="chosenKey", values=["fine", response], first_row=7)
    with pytest.raises(DataError) as raised:
        encode(prompts, responses, chat)
    assert str(raised.value).startswith(sentence)


def test_messages_without_a_template_are_refused(plain: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"row 0 .* is a list of messages, but the tokenizer has no chat template"):
        prompt_tokens([USER], plain, chat_template="Auto")


def test_an_empty_prompt_is_refused(plain: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"row 0 .* is empty"):
        prompt_tokens("", plain, chat_template="Auto")


def test_a_tokenizer_without_an_end_of_text_is_refused(plain: PreTrainedTokenizerFast) -> None:
    plain.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-text token"):
        pair_tokens("a", "b", plain)
