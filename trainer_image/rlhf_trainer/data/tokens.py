"""Encoding of prompts and responses as token ids, through the tokenizer's chat template if it applies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlhf_api.spec.verifiers import ANSWERS, are_answers
from rlhf_trainer.errors import ConfigError

ChatTemplate = Literal["Auto", "Never"]
ChatMessage = dict[str, Any]
Ids = list[int]
T = TypeVar("T")
ASSISTANT = "assistant"


class BadValueError(Exception):
    """Error for a data column's value of a wrong type; the text follows the row in a sentence: `holds nothing`."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """Consecutive values of one column of a data set."""

    field: str
    """Field of the manifest that names the column, such as "spec.data.train.promptKey"."""
    values: Sequence[object]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Reason why a row of the data set is bad."""

    field: str
    what: str
    """Text of the reason, which follows the row's place in a sentence."""


class Conversation(NamedTuple):
    """Token ids of a whole conversation."""

    prompt: Ids
    """Token ids before the first answer that counts in the loss."""
    rest: Ids
    learned: Ids
    """Loss mask of `rest`: 1 for each token of an answer that counts, its end-of-text token included; else 0."""


class Encoder:
    """Encoder of consecutive rows; `faults` holds the fault of each bad row.

    A prompt is a text or a list of messages. Messages go through the tokenizer's chat template. So does a text, as one
    message of the user, if the tokenizer has a template and `chat_template` is "Auto". Otherwise the text is encoded as
    it stands, without added tokens. A final answer among the messages is not part of the prompt.
    """

    def __init__(
        self,
        prompts: Column,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: ChatTemplate,
        tools: Column | None = None,
    ) -> None:
        """Read the prompts; tools: each row's tool definitions, in the form that the chat template takes."""
        self.faults: dict[int, Fault] = {}
        """Faults of the encoded rows: index of a row -> the first fault found in it."""
        self._tokenizer = tokenizer
        self._prompts, self._tools = prompts, tools
        self._chats = self._each(prompts, lambda index: self._chat(index, chat_template))

    def prompts(self) -> list[Ids]:
        """Return the token ids of each prompt, up to the start of the response; `faults` records an empty prompt."""
        encoded = self._encoded(self._each(self._prompts, lambda index: self._text(index, None)))
        self._each(self._prompts, lambda index: _require(bool(encoded[index]), "is empty"))
        return encoded

    def responses(self, responses: Column, prompt_ids: Sequence[Ids]) -> list[Ids]:
        """Return the token ids of each prompt's response, with the end-of-text token; ConfigError without such a token.

        A response is a text, a message of the assistant, or messages that end with one. With a chat template its ids
        follow `prompt_ids` in the whole conversation, up to the last end-of-text token. Without a template, and where
        the conversation does not start with `prompt_ids`, the text is encoded by itself. A missing end token is added.
        """
        end = end_of_text(self._tokenizer)
        replies = self._each(responses, lambda index: self._reply(responses.values[index], index))
        encoded = self._encoded(self._each(responses, lambda index: self._text(index, replies[index])))
        apart = []
        for index, prompt in enumerate(prompt_ids):
            if isinstance(self._chats[index], list):
                if encoded[index][: len(prompt)] != prompt:
                    apart.append(index)
                encoded[index] = _up_to_last(end, encoded[index][len(prompt) :])
        alone = [reply["content"] if (reply := replies[index]) else None for index in apart]
        for index, ids in zip(apart, self._encoded(alone), strict=True):
            encoded[index] = ids
        return [ids if ids and ids[-1] == end else [*ids, end] for ids in encoded]

    def written(self, responses: Column) -> list[Ids]:
        """Return the token ids of each prompt with its response in the tokenizer's own form.

        A conversation goes through the template; a text gets the tokens that the tokenizer adds to any text.
        """
        replies = self._each(responses, lambda index: self._reply(responses.values[index], index))
        texts = self._each(responses, lambda index: self._text(index, replies[index]))
        found = self._encoded(texts)
        for index, chat in enumerate(self._chats):
            if isinstance(chat, str):
                found[index] = self._tokenizer(chat + (texts[index] or ""), verbose=False)["input_ids"]
        return found

    def conversations(self) -> list[Conversation]:
        """Return the prompts as conversations that end with an answer; all answers count in the loss.

        Some templates change an earlier answer once the conversation goes on (they leave out its thoughts). Then only
        the last answer counts.
        """
        end, prompts = end_of_text(self._tokenizer), self.prompts()
        values = self._prompts.values
        self._each(self._prompts, lambda index: _require(isinstance(values[index], list), "is no conversation"))
        replies = self.responses(self._prompts, prompts)
        earlier = [texts or [] for texts in self._each(self._prompts, self._earlier_answers)]
        encoded = iter(self._encoded([text for texts in earlier for pair in texts for text in pair]))
        found = []
        for prompt, reply, texts in zip(prompts, replies, earlier, strict=True):
            whole = [*prompt, *reply]
            cuts = [cut for _ in texts for cut in (next(encoded), _up_to_last(end, next(encoded)))]
            if any(whole[: len(cut)] != cut for cut in cuts):
                cuts = []
            places = [*map(len, cuts), len(prompt), len(whole)]
            learned = [0] * len(whole)
            for start, stop in zip(places[::2], places[1::2], strict=True):
                learned[start:stop] = [1] * (stop - start)
            start = places[0]
            found.append(Conversation(whole[:start], whole[start:], learned[start:]))
        return found

    def labels(self, labels: Column) -> list[Ids]:
        """Return [1] or [0] for each row of a column of labels, whose cells are true or false, or 1 or 0."""
        found = self._each(labels, lambda index: _label(labels.values[index]))
        return [[label or 0] for label in found]

    def require_answers(self, column: Column, name: str) -> None:
        """Record a fault for each row that has no reference answer in the column `name`."""
        self._each(column, lambda index: _require(are_answers(column.values[index]), _no_answer(column, index, name)))

    def _each(self, column: Column, read: Callable[[int], T]) -> list[T | None]:
        """Call `read` for each row; None for a row with a fault. A new fault is recorded in `faults`."""
        found: list[T | None] = []
        for index in range(len(column.values)):
            try:
                found.append(None if index in self.faults else read(index))
            except BadValueError as error:
                self.faults[index] = Fault(field=column.field, what=str(error))
                found.append(None)
        return found

    def _chat(self, index: int, chat_template: ChatTemplate) -> list[ChatMessage] | str:
        """Return the prompt of a row as a conversation, or as a text that is encoded as it stands."""
        prompt, has_template = self._prompts.values[index], bool(self._tokenizer.chat_template)
        if isinstance(prompt, str):
            return [_as_message("user", prompt)] if has_template and chat_template == "Auto" else prompt
        if not isinstance(prompt, list) or not prompt:
            raise BadValueError(f"holds {_kind(prompt)}, not a text or a list of messages")
        _require(has_template, "is a list of messages, but the tokenizer has no chat template")
        chat = [_message(message) for message in prompt]
        return chat[:-1] if chat[-1]["role"] == ASSISTANT else chat

    def _reply(self, response: object, index: int) -> ChatMessage:
        if isinstance(response, str):
            return _as_message(ASSISTANT, response)
        messages = [_message(item) for item in (response if isinstance(response, list) else [response])]
        is_reply = bool(messages) and messages[-1]["role"] == ASSISTANT
        _require(is_reply, "does not end with a message of the assistant")
        answers = sum(message["role"] == ASSISTANT for message in messages)
        goes_on = answers == 1 or messages[:-1] == self._chats[index]
        _require(goes_on, f"holds {answers} messages of the assistant, and those before the last are not the prompt")
        return messages[-1]

    def _text(self, index: int, reply: ChatMessage | None) -> str:
        """Return a row's text to encode: a conversation, with a reply if given; else the prompt or the reply alone."""
        chat = self._chats[index]
        if isinstance(chat, list):
            return self._rendered(index, [*chat, reply] if reply else chat, is_prompt=reply is None)
        return str(reply["content"] if reply else chat)

    def _earlier_answers(self, index: int) -> list[tuple[str, str]]:
        """Return the rendered conversation up to the start and up to the end of each of its answers but the last."""
        chat = self._chats[index]
        assert isinstance(chat, list), "conversations go through a template"
        places = [place for place, message in enumerate(chat) if message["role"] == ASSISTANT]
        return [
            (self._rendered(index, chat[:at], is_prompt=True), self._rendered(index, chat[: at + 1], is_prompt=False))
            for at in places
        ]

    def _rendered(self, index: int, chat: list[ChatMessage], *, is_prompt: bool) -> str:
        tools = self._tools.values[index] if self._tools else None
        try:
            text = self._tokenizer.apply_chat_template(
                chat, tools=tools or None, tokenize=False, add_generation_prompt=is_prompt
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
        ) as error:  # by bad tools or the template itself
            raise BadValueError(f"is refused by the tokenizer's chat template: {error}") from error
        return str(text)

    def _encoded(self, texts: Sequence[str | None]) -> list[Ids]:
        if not texts:
            return []
        given = [text or "" for text in texts]
        encoding = self._tokenizer(given, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[Ids] = encoding["input_ids"]
        return ids


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the end-of-text token; ConfigError if the tokenizer has none."""
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ConfigError(f"the tokenizer {tokenizer.name_or_path!r} has no end-of-text token")
    return end


def _up_to_last(end: int, ids: Ids) -> Ids:
    """Return the ids up to and with the last `end` token: a model stops there, but templates add a line break."""
    return ids[: len(ids) - ids[::-1].index(end)] if end in ids else ids


def _as_message(role: str, text: str) -> ChatMessage:
    return {"role": role, "content": text}


def _message(value: object) -> ChatMessage:
    """Return a message with its content as text, without None values, which a table adds for keys of other rows."""
    if not isinstance(value, dict):
        raise BadValueError(f"holds {_kind(value)}, not a text or a message")
    message = {key: item for key, item in value.items() if item is not None}
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    is_message = isinstance(message.get("role"), str) and isinstance(content, str)
    _require(is_message, "has a message whose 'role' or 'content' is not a text")
    return {**message, "content": content}


def _label(value: object) -> int:
    if isinstance(value, bool) or value in (0, 1):
        return int(bool(value))
    raise BadValueError(f"holds {_kind(value)}, not true or false")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BadValueError(otherwise)


def _no_answer(column: Column, index: int, name: str) -> str:
    value = column.values[index]
    return f"holds no {name}" if value in (None, [], "") else f"holds {value!r:.60} as {name}, expected {ANSWERS}"


def _kind(value: object) -> str:
    return "nothing" if value is None or value == [] else f"a value of type {type(value).__name__}"
