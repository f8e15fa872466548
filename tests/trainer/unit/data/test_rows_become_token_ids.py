"""Prompts and responses become the ids that the model sees, with a chat template and without."""

from itertools import groupby

import pytest
from transformers import PreTrainedTokenizerFast

from rlhf_trainer.data.tokens import Column, Encoder, Fault, Ids
from rlhf_trainer.errors import ConfigError

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be kind"}
REPLY = {"role": "assistant", "content": "hello"}
Prompt = str | list[dict[str, str]]


def encoder_of(prompts: list[object], tokenizer: PreTrainedTokenizerFast, mode: str = "Auto") -> Encoder:
    return Encoder(Column(field="promptKey", values=prompts), tokenizer, chat_template=mode)


def prompt_tokens(prompt: Prompt, tokenizer: PreTrainedTokenizerFast, *, chat_template: str) -> Ids:
    """Token ids of one prompt."""
    return encoder_of([prompt], tokenizer, chat_template).prompts()[0]


def pair_tokens(prompt: object, response: object, tokenizer: PreTrainedTokenizerFast) -> tuple[Ids, Ids]:
    """(prompt ids, response ids) of one row without faults."""
    encoder = encoder_of([prompt], tokenizer)
    ids = encoder.prompts()
    replies = encoder.responses(Column(field="chosenKey", values=[response]), ids)
    assert encoder.faults == {}
    return ids[0], replies[0]


PROMPTS: dict[str, tuple[Prompt, bool, str, str]] = {
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
    chat.chat_template = str(chat.chat_template).replace("</s>", "")
    _, ids = pair_tokens("hi", "hello", chat)
    assert chat.decode(ids) == "hello\n</s>"


def test_a_template_may_end_turns_otherwise(chat: PreTrainedTokenizerFast) -> None:
    chat.chat_template = str(chat.chat_template).replace("</s>", "<pad>")
    _, ids = pair_tokens("hi", "hello", chat)
    assert chat.decode(ids) == "hello<pad>"
    assert [chat.decode(row) for row in encoder_of(["hi"], chat, "Never").prompts()] == ["hi"]


PLAIN_TEXTS = {"Human: hi": "<s>Human: hi", "<s>hi": "<s>hi"}


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_a_plain_text_begins_as_the_tokenizer_says(text: str, opening: PreTrainedTokenizerFast) -> None:
    prompt, reply = pair_tokens(text, "hello", opening)
    assert opening.decode(prompt) == PLAIN_TEXTS[text]
    assert opening.decode(reply) == "hello</s>"
    assert prompt == opening("Human: hi" if "Human" in text else "hi")["input_ids"]


def test_messages_begin_as_the_template_says(opening: PreTrainedTokenizerFast, chat: PreTrainedTokenizerFast) -> None:
    opening.chat_template = chat.chat_template
    assert opening.decode(prompt_tokens("hi", opening, chat_template="Auto")).startswith("<|user|>")
    opening.chat_template = "<s>" + str(chat.chat_template)
    assert opening.decode(prompt_tokens("hi", opening, chat_template="Auto")).startswith("<s><|user|>")


def test_an_empty_text_is_a_fault_with_an_opening(opening: PreTrainedTokenizerFast) -> None:
    encoder = encoder_of([""], opening)
    encoder.prompts()
    assert encoder.faults == {0: Fault(field="promptKey", what="is empty")}


def test_a_template_that_prompts_otherwise_than_it_records(chat: PreTrainedTokenizerFast) -> None:
    chat.chat_template = str(chat.chat_template).replace("<|assistant|>", "<|assistant|>think: ")
    encoder = encoder_of(["hi", "ho"], chat)
    ids = encoder.prompts()
    assert [chat.decode(row) for row in ids] == [f"<|user|>{text}</s>\n<|assistant|>think: " for text in ("hi", "ho")]
    encoded = encoder.responses(Column(field="x", values=["hello", "hey"]), ids)
    assert [chat.decode(row) for row in encoded] == ["hello</s>", "hey</s>"]


def test_a_pair_may_be_two_whole_conversations(chat: PreTrainedTokenizerFast) -> None:
    talk = [USER, REPLY, {"role": "user", "content": "and you?"}]
    prompt, ids = pair_tokens([*talk, REPLY], [*talk, {"role": "assistant", "content": "fine"}], chat)
    assert chat.decode(prompt) == "<|user|>hi</s>\n<|assistant|>hello</s>\n<|user|>and you?</s>\n<|assistant|>"
    assert chat.decode(ids) == "fine</s>"


def test_contents_in_parts_are_one_text(chat: PreTrainedTokenizerFast) -> None:
    parts = [{"type": "text", "text": "good "}, {"type": "text", "text": "day"}]
    assert chat.decode(prompt_tokens([{"role": "user", "content": parts}], chat, chat_template="Auto")).startswith(  # type: ignore[dict-item]
        "<|user|>good day</s>"
    )


def learned(messages: object, tokenizer: PreTrainedTokenizerFast) -> tuple[str, str, list[str]]:
    """(prompt, rest, runs of learned tokens) of a conversation, as texts."""
    encoder = encoder_of([messages], tokenizer)
    (prompt,), (marked,) = encoder.conversations()
    assert encoder.faults == {}
    runs = [[*run] for is_learned, run in groupby(marked, key=lambda token: token >= 0) if is_learned]
    rest = [max(token, ~token) for token in marked]
    return tokenizer.decode(prompt), tokenizer.decode(rest), [tokenizer.decode(run) for run in runs]


TALK = [SYSTEM, USER, REPLY, {"role": "user", "content": "sing"}, {"role": "assistant", "content": "la la"}]


def test_every_answer_of_a_conversation_is_learned(chat: PreTrainedTokenizerFast) -> None:
    prompt, rest, runs = learned(TALK, chat)
    assert prompt == "<|system|>be kind</s>\n<|user|>hi</s>\n<|assistant|>"
    assert rest == "hello</s>\n<|user|>sing</s>\n<|assistant|>la la</s>"
    assert runs == ["hello</s>", "la la</s>"]


FORGETS = "{% if message.role == 'assistant' and not loop.last %}...{% else %}{{ message.content }}{% endif %}"


def test_a_template_that_forgets_an_answer_is_a_fault(chat: PreTrainedTokenizerFast) -> None:
    chat.chat_template = str(chat.chat_template).replace("{{ message.content }}", FORGETS)
    encoder = encoder_of([TALK], chat)
    encoder.conversations()
    told = "has a message of role 'assistant' that the tokenizer's chat template leaves out"
    assert encoder.faults == {0: Fault(field="promptKey", what=told)}


def test_a_tool_that_is_none_is_a_fault_of_its_row(chat: PreTrainedTokenizerFast) -> None:
    tools = Column(field="toolsKey", values=["add two numbers"])
    prompts = Column(field="promptKey", values=["What is 1 + 1?"])
    encoder = Encoder(prompts, chat, chat_template="Auto", tools=tools)
    encoder.prompts()
    assert encoder.faults[0].what == "holds tools or tool calls that are no list of mappings"


def test_a_tool_call_needs_no_content(chat: PreTrainedTokenizerFast) -> None:
    chat.chat_template = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + str(
        chat.chat_template
    ).replace("{{ message.content }}", "{{ message.tool_calls or message.content }}")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "2"}, REPLY]
    tools = Column(field="toolsKey", values=[[{"type": "function", "function": {"name": "add"}}]])
    encoder = Encoder(Column(field="messagesKey", values=[talk]), chat, chat_template="Auto", tools=tools)
    (prompt,), (marked,) = encoder.conversations()
    assert encoder.faults == {}
    text = chat.decode([*prompt, *(max(token, ~token) for token in marked)])
    assert text.startswith("[add]<|user|>hi</s>")
    assert "'name': 'add'" in text


FAULTS: dict[str, tuple[object, object, str]] = {
    "nothing": (None, "x", "promptKey holds nothing, not a text or a list of messages"),
    "a number": (3, "x", "promptKey holds a value of type int, not a text or a list of messages"),
    "no messages": ([], "x", "promptKey holds nothing, not a text or a list of messages"),
    "a list of texts": (["a"], "x", "promptKey holds a value of type str, not a text or a message"),
    "a message without content": (
        [{"role": "user", "content": None}],
        "x",
        "promptKey has a message whose 'role' or 'content' is not a text",
    ),
    "a picture": (
        [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
        "x",
        "promptKey has a message of role 'user' with a part of type 'image'; only texts are read",
    ),
    "a conversation that the template refuses": (
        [{"role": "nobody", "content": "a"}],
        "x",
        "promptKey is refused by the tokenizer's chat template: who is nobody?",
    ),
    "no response": ("a", None, "chosenKey holds nothing, not a text or a message"),
    "two responses": (
        "a",
        [REPLY, REPLY],
        "chosenKey holds 2 messages of the assistant, and those before the last are not the prompt",
    ),
    "a response of the user": ("a", USER, "chosenKey does not end with a message of the assistant"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_value_that_cannot_be_encoded_is_named(name: str, chat: PreTrainedTokenizerFast) -> None:
    prompt, response, sentence = FAULTS[name]
    guard = "{% if messages[0].role == 'nobody' %}{{ raise_exception('who is nobody?') }}{% endif %}"
    chat.chat_template = guard + str(chat.chat_template)
    encoder = encoder_of(["fine", prompt], chat)
    encoder.responses(Column(field="chosenKey", values=["fine", response]), encoder.prompts())
    assert {row: f"{fault.field} {fault.what}" for row, fault in encoder.faults.items()} == {1: sentence}


def test_an_empty_prompt_is_a_fault(plain: PreTrainedTokenizerFast) -> None:
    encoder = encoder_of(["a", ""], plain)
    encoder.prompts()
    assert encoder.faults == {1: Fault(field="promptKey", what="is empty")}


def test_a_faulty_row_leaves_the_others_as_they_are(chat: PreTrainedTokenizerFast) -> None:
    encoder = encoder_of(["hi", None, "ho"], chat)
    ids = encoder.prompts()
    replies = encoder.responses(Column(field="chosenKey", values=["a", "b", "c"]), ids)
    assert [(ids[row], replies[row]) for row in (0, 2)] == [pair_tokens("hi", "a", chat), pair_tokens("ho", "c", chat)]


def test_a_text_is_no_conversation(chat: PreTrainedTokenizerFast) -> None:
    encoder = encoder_of(["hi", [USER]], chat)
    encoder.conversations()
    assert [fault.what for fault in encoder.faults.values()] == [
        "is no conversation",
        "does not end with a message of the assistant",
    ]


def test_messages_without_a_template_are_a_fault(plain: PreTrainedTokenizerFast) -> None:
    encoder = encoder_of([[USER]], plain)
    assert encoder.faults[0].what == "is a list of messages, but the tokenizer has no chat template"


def test_a_tokenizer_without_an_end_of_text_is_refused(plain: PreTrainedTokenizerFast) -> None:
    plain.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-text token"):
        pair_tokens("a", "b", plain)
