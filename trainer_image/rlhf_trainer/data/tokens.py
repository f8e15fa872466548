"""Encoding of prompts and responses as token ids, through the tokenizer's chat template if it applies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from rlhf_api.spec.verifiers import ANSWERS, are_answers
from rlhf_trainer.chat import (
    ASSISTANT,
    TEMPLATE,
    BadValueError,
    ChatMessage,
    EndTokens,
    Template,
    kind_of,
    name_of,
    read_message,
    read_tools,
    require,
    says_all,
)
from rlhf_trainer.thoughts import BEGUN

Ids = list[int]
Instruct = Callable[[list[ChatMessage] | str, int], list[ChatMessage] | str]
"""Function (prompt, index of its row) -> the prompt with the job's instructions; raises BadValueError."""
T = TypeVar("T")
UNLEARNED = f"an answer is not learned, as it cannot be found whole in the rendering of {TEMPLATE}"
UNALIGNED = "an answer is not learned, as the tokenizer, which gives no offsets, joins its text with text beside it"
UNLEARNED_NOTES = (UNLEARNED, UNALIGNED)
"""Notes on answers that do not count in the loss."""
LABELS: Mapping[object, int] = {1: 1, 0: 0, "true": 1, "false": 0, "1": 1, "0": 0}
"""Cell of a column of labels -> label; cells of a CSV file are texts."""
NO_TOOLS = f"tools are not in the prompt, as {TEMPLATE} does not write them"


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


class Encoder:
    """Encoder of consecutive rows; `faults` holds the fault of each bad row.

    A prompt is a text or a list of messages. Messages go through the tokenizer's chat template. So does a text, as one
    message of the user, if the tokenizer has a template and `chat_template` is not "Never". Else the text is encoded as
    it stands, after the tokenizer's opening tokens (BOS). A final answer among the messages is not part of the prompt.
    """

    def __init__(
        self,
        prompts: Column,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str,
        tools: Column | None = None,
        ends: EndTokens | None = None,
        instruct: Instruct = lambda chat, _: chat,
    ) -> None:
        """Read the prompts; tools: each row's tool definitions; ends: by default those of the tokenizer alone."""
        self.faults: dict[int, Fault] = {}
        """Faults of the encoded rows: index of a row -> the first fault found in it."""
        self.notes: list[tuple[int, str]] = []
        """Index of a row, and sentence on what the chat template does with the row; an index may occur again."""
        self._prompts, self._tokenizer, self._template = prompts, tokenizer, Template(tokenizer, ends)
        self._given = self._each(prompts, lambda index: self._chat(index, chat_template))
        self._chats = self._each(prompts, lambda index: (given := self._given[index]) and instruct(given, index))
        read = self._each(tools or prompts, lambda index: read_tools(tools and tools.values[index]))
        self._tools = [found or [] for found in read]

    def prompts(self) -> list[Ids]:
        """Return the token ids of each prompt, up to the start of the response; `faults` records an empty prompt."""
        texts = self._each(self._prompts, lambda index: self._text(index, None))
        encoded = self._encoded(texts)
        self._each(self._prompts, lambda index: require(bool(encoded[index]), "is empty"))
        rows = enumerate(zip(texts, self._tools, strict=True))
        lacking = [index for index, (text, tools) in rows if not all(name_of(tool) in (text or "") for tool in tools)]
        self.notes += [(index, NO_TOOLS) for index in lacking]
        pairs = zip(encoded, self._chats, strict=True)
        return [self._template.opened(ids) if isinstance(chat, str) else ids for ids, chat in pairs]

    def responses(self, responses: Column, prompt_ids: Sequence[Ids]) -> list[Ids]:
        """Return the token ids of each prompt's response, with the token that ends it.

        A response is a text, a message of the assistant, or messages that end with one. With a chat template its ids
        follow `prompt_ids` in the whole conversation, up to the last end token. Without a template, and where
        the conversation does not start with `prompt_ids`, the answer is encoded by itself. A missing end is added.
        """
        replies = self._each(responses, lambda index: self._reply(responses.values[index], index))
        texts = self._each(responses, lambda index: self._text(index, replies[index]))
        encoded = self._encoded(texts)
        starts = [ids[: len(prompt)] == prompt for ids, prompt in zip(encoded, prompt_ids, strict=True)]
        alone = self._each(responses, lambda index: self._alone(index, replies[index], texts[index], starts[index]))
        found = []
        for index, ids in enumerate(self._encoded(alone)):
            is_talk, reply = isinstance(self._chats[index], list), ids if alone[index] else encoded[index]
            if is_talk and not alone[index]:
                reply = self._template.ends.cut(reply[len(prompt_ids[index]) :])
            end = self._template.ends.ids[0] if is_talk else self._tokenizer.eos_token_id
            found.append(reply if reply and reply[-1] in self._template.ends.ids else [*reply, end])
        return found

    def written(self, responses: Column) -> list[Ids]:
        """Return the token ids of each prompt with its response in the tokenizer's own form.

        A conversation goes through the template; a text gets the tokens that the tokenizer adds to any text.
        """
        self._each(self._prompts, lambda index: self._text(index, None))
        replies = self._each(responses, lambda index: self._reply(responses.values[index], index))
        texts = self._each(responses, lambda index: self._text(index, replies[index]))
        found = self._encoded(texts)
        for index, chat in enumerate(self._chats):
            if isinstance(chat, str):
                found[index] = self._tokenizer(chat + (texts[index] or ""), verbose=False)["input_ids"]
        return found

    def conversations(self) -> tuple[list[Ids], list[Ids]]:
        """Return (ids before the first answer that counts in the loss, other ids) of prompts that end with an answer.

        All answers count, with their end tokens; a token outside the loss is stored as ~token. Each answer before the
        last is found in the rendering of the last one's prompt. An answer that is not found, or that lacks its thoughts
        there, does not count: `notes` says so.
        """
        prompts, values = self.prompts(), self._prompts.values
        self._each(self._prompts, lambda index: require(isinstance(values[index], list), "is no conversation"))
        replies = self.responses(self._prompts, prompts)
        masks = self._each(self._prompts, lambda index: self._earlier_mask(index, len(prompts[index])))
        starts, rests = list[Ids](), list[Ids]()
        for prompt, reply, earlier in zip(prompts, replies, masks, strict=True):
            whole, learned = [*prompt, *reply], [*(earlier or [0] * len(prompt)), *[1] * len(reply)]
            start = learned.index(1)
            pairs = zip(whole[start:], learned[start:], strict=True)
            starts.append(whole[:start])
            rests.append([token if is_learned else ~token for token, is_learned in pairs])
        return starts, rests

    def labels(self, labels: Column) -> list[Ids]:
        """Return [1] or [0] for each row of a column of labels, whose cells are keys of `LABELS`."""
        found = self._each(labels, lambda index: _label(labels.values[index]))
        return [[label or 0] for label in found]

    def require_answers(self, column: Column, name: str) -> None:
        """Record a fault for each row that has no reference answer, or mapping of tests, in the column `name`."""
        values = column.values
        self._each(column, lambda row: require(are_answers(values[row], dict), _no_answer(column, row, name)))

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

    def _chat(self, index: int, chat_template: str) -> list[ChatMessage] | str:
        """Return the prompt of a row as a conversation, or as a text that is encoded as it stands."""
        prompt, has_template = self._prompts.values[index], bool(self._tokenizer.chat_template)
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}] if has_template and chat_template != "Never" else prompt
        if not isinstance(prompt, list) or not prompt:
            raise BadValueError(f"holds {kind_of(prompt)}, not a text or a list of messages")
        require(has_template, "is a list of messages, but the tokenizer has no chat template")
        chat = [read_message(message) for message in prompt]
        return chat[:-1] if chat[-1]["role"] == ASSISTANT else chat

    def _reply(self, response: object, index: int) -> ChatMessage:
        if isinstance(response, str):
            return {"role": ASSISTANT, "content": response}
        messages = [read_message(item) for item in (response if isinstance(response, list) else [response])]
        is_reply = bool(messages) and messages[-1]["role"] == ASSISTANT
        require(is_reply, "does not end with a message of the assistant")
        answers = sum(message["role"] == ASSISTANT for message in messages)
        goes_on = answers == 1 or messages[:-1] == self._given[index]
        require(goes_on, f"holds {answers} messages of the assistant, and those before the last are not the prompt")
        return messages[-1]

    def _text(self, index: int, reply: ChatMessage | None) -> str:
        """Return a row's text to encode: a conversation, with a reply if given; else the prompt or the reply alone."""
        chat, tools = self._chats[index], self._tools[index]
        if not isinstance(chat, list):
            return str(reply["content"] if reply else chat)
        whole, since = ([*chat, reply], len(chat)) if reply else (chat, 0)  # templates may drop earlier messages
        return self._template.render(whole, tools, is_prompt=reply is None, since=since)

    def _alone(self, index: int, reply: ChatMessage | None, text: str | None, starts_with_prompt: bool) -> str:
        """Return a last answer to encode by itself; empty if it follows its prompt, and is whole, in the row's text."""
        chat, tools = self._chats[index], self._tools[index]
        if not isinstance(chat, list) or not text or not reply or (starts_with_prompt and says_all(text, reply)):
            return ""
        place, content = self._template.answer(text, [*chat, reply], len(chat), tools), str(reply["content"])
        if place and says_all(text[place], reply):
            return text[place]
        require(says_all(content, reply), f"has a last answer that {TEMPLATE} leaves out in part")
        if (begun := BEGUN.search(self._template.render(chat, tools, is_prompt=True))) and not begun[2]:
            content = content.lstrip().removeprefix(begun[1]).removeprefix("\n")
        return content or str(self._tokenizer.eos_token)

    def _earlier_mask(self, index: int, length: int) -> Ids:
        """Return the loss mask of a conversation's prompt of `length` tokens: 1 on each earlier answer that counts."""
        chat, tools, mask = self._chats[index], self._tools[index], [0] * length
        assert isinstance(chat, list), "conversations go through a template"
        answers = [number for number, each in enumerate(chat) if each["role"] == ASSISTANT]
        text = self._template.render(chat, tools, is_prompt=True)
        places = [(self._template.answer(text, chat, number, tools), chat[number]) for number in answers]
        kept = [place for place, each in places if place and says_all(text[place], each)]
        self.notes += [(index, UNLEARNED)] * (len(answers) - len(kept))
        if not self._tokenizer.is_fast:
            return self._mask_without_offsets(text, kept, mask, index)
        return self._mask(text, kept, mask) if kept else mask

    def _mask(self, text: str, places: Sequence[slice], mask: Ids) -> Ids:
        """Set the mask of a text's tokens to 1 on those that begin inside a place; white space may have no length."""
        given = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for number, (start, end) in enumerate(given["offset_mapping"]):
            mask[number] = int(any(each.start <= start < each.stop and end > each.start for each in places))
        return mask

    def _mask_without_offsets(self, text: str, places: Sequence[slice], mask: Ids, index: int) -> Ids:
        """Set the mask as `_mask` does, without offsets: the texts up to where a place begins and ends are encoded."""
        (whole,) = self._encoded([text])
        for place in places:
            before, until = self._encoded([text[: place.start], text[: place.stop]])
            if whole[: len(until)] == until and until[: len(before)] == before:
                mask[len(before) : len(until)] = [1] * (len(until) - len(before))
            else:
                self.notes.append((index, UNALIGNED))
        return mask

    def _encoded(self, texts: Sequence[str | None]) -> list[Ids]:
        if not texts:
            return []
        given = [text or "" for text in texts]
        encoding = self._tokenizer(given, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[Ids] = encoding["input_ids"]
        return ids


def _label(value: object) -> int:
    name = value.strip().lower() if isinstance(value, str) else value
    if isinstance(name, int | float | str) and name in LABELS:
        return LABELS[name]
    raise BadValueError(f"holds {value!r:.60}, not true or false")


def _no_answer(column: Column, index: int, name: str) -> str:
    value = column.values[index]
    return f"holds no {name}" if value in (None, [], "") else f"holds {value!r:.60} as {name}, expected {ANSWERS}"
