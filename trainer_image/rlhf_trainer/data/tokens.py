"""Turns the prompts and responses of a data set into token ids, through the tokenizer's chat template if it applies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlhf_trainer.errors import ConfigError, DataError

ChatTemplate = Literal["Auto", "Never"]
Message = dict[str, str]
Ids = list[int]


@dataclass(frozen=True, kw_only=True)
class Column:
    """Consecutive values of one column, with their field and rows for messages."""

    field: str
    """The manifest's field that names the column, such as "spec.data.train.promptKey"."""
    values: Sequence[object]
    """Texts, messages or lists of messages."""
    first_row: int = 0

    def fault(self, index: int, what: str) -> DataError:
        """The error of the value at `index`; `what` goes on after its row."""
        return DataError(f"{self.field}: row {self.first_row + index} (counted from 0) {what}")


def encode_prompts(prompts: Column, tokenizer: PreTrainedTokenizerBase, *, chat_template: ChatTemplate) -> list[Ids]:
    """Token ids of each prompt, up to where the response starts.

    A list of messages goes through the tokenizer's chat template. So does a text, as one message of the user, if the
    tokenizer has a template and `chat_template` is "Auto"; otherwise a text is encoded as it stands, no token added.
    Raises DataError, naming the row, for any other value, for no tokens at all, and for messages without a template.
    """
    texts = []
    for index, prompt in enumerate(prompts.values):
        chat = _chat(prompts, index, tokenizer, chat_template)
        texts.append(str(prompt) if chat is None else _rendered(prompts, index, chat, tokenizer, is_prompt=True))
    encoded = _encoded(texts, tokenizer)
    for index, ids in enumerate(encoded):
        if not ids:
            raise prompts.fault(index, "is empty")
    return encoded


def encode_responses(
    prompts: Column,
    prompt_ids: Sequence[Ids],
    responses: Column,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: ChatTemplate,
) -> list[Ids]:
    """Token ids of the response to each prompt, the end-of-text token included.

    A response is a text, a message of the assistant or a list that holds exactly one. With a chat template it is what
    follows `prompt_ids` in the whole conversation, up to its last end-of-text token; where the conversation does not
    start with `prompt_ids`, and without a template, it is the text encoded by itself. The end is added if it is absent.
    Raises DataError, naming the row, for any other value; ConfigError if the tokenizer has no end-of-text token.
    """
    end = end_of_text(tokenizer)
    replies = [_reply(responses, index) for index in range(len(responses.values))]
    chats = [_chat(prompts, index, tokenizer, chat_template) for index in range(len(replies))]
    whole = [
        reply if chat is None else _rendered(prompts, index, [*chat, _as_message("assistant", reply)], tokenizer)
        for index, (chat, reply) in enumerate(zip(chats, replies, strict=True))
    ]
    encoded = _encoded(whole, tokenizer)
    apart = []
    for index in (index for index, chat in enumerate(chats) if chat is not None):
        start = len(prompt_ids[index])
        if encoded[index][:start] != prompt_ids[index]:
            apart.append(index)
        encoded[index] = _up_to_last(end, encoded[index][start:])
    for index, ids in zip(apart, _encoded([replies[index] for index in apart], tokenizer), strict=True):
        encoded[index] = ids
    return [ids if ids and ids[-1] == end else [*ids, end] for ids in encoded]


def encode_labels(labels: Column) -> list[Ids]:
    """Each true or false as a row of one number, 1 or 0; DataError, naming the row, for any other value."""
    for index, value in enumerate(labels.values):
        if not isinstance(value, bool):
            raise labels.fault(index, f"holds {_kind(value)}, not true or false")
    return [[int(bool(value))] for value in labels.values]


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that ends a response; ConfigError if the tokenizer has none."""
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ConfigError(f"the tokenizer {tokenizer.name_or_path!r} has no end-of-text token")
    return end


def _encoded(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[Ids]:
    if not texts:
        return []
    encoding = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    ids: list[Ids] = encoding["input_ids"]
    return ids


def _up_to_last(end: int, ids: Ids) -> Ids:
    """The ids up to the last `end`: templates add a line break after it, which a model that stopped never writes."""
    return ids[: len(ids) - ids[::-1].index(end)] if end in ids else ids


def _as_message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _chat(
    prompts: Column, index: int, tokenizer: PreTrainedTokenizerBase, chat_template: ChatTemplate
) -> list[Message] | None:
    """The prompt as a conversation; None for a text that is encoded as it stands."""
    prompt = prompts.values[index]
    if isinstance(prompt, str):
        return [_as_message("user", prompt)] if tokenizer.chat_template and chat_template == "Auto" else None
    if not isinstance(prompt, list) or not prompt:
        raise prompts.fault(index, f"holds {_kind(prompt)}, not a text or a list of messages")
    if not tokenizer.chat_template:
        raise prompts.fault(index, "is a list of messages, but the tokenizer has no chat template")
    return [_message(prompts, index, message) for message in prompt]


def _reply(responses: Column, index: int) -> str:
    response = responses.values[index]
    if isinstance(response, str):
        return response
    messages = [_message(responses, index, item) for item in (response if isinstance(response, list) else [response])]
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    if len(said) != 1:
        raise responses.fault(index, f"holds {len(said)} messages of the assistant instead of one")
    return said[0]


def _message(column: Column, index: int, value: object) -> Message:
    """A message without the keys that only other rows have, which a table fills with None."""
    if not isinstance(value, dict):
        raise column.fault(index, f"holds {_kind(value)}, not a text or a message")
    if not isinstance(value.get("role"), str) or not isinstance(value.get("content"), str):
        raise column.fault(index, "has a message whose 'role' or 'content' is not a text")
    return {key: item for key, item in value.items() if item is not None}


def _kind(value: object) -> str:
    return "nothing" if value is None or value == [] else f"a value of type {type(value).__name__}"


def _rendered(
    prompts: Column, index: int, chat: list[Message], tokenizer: PreTrainedTokenizerBase, *, is_prompt: bool = False
) -> str:
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=is_prompt)
    except TemplateError as error:
        raise prompts.fault(index, f"is refused by the tokenizer's chat template: {error}") from error
    return str(text)
