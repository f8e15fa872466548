"""Chat templates: messages in one form, their rendering, and the tokens that begin a text or end a response."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlhf_trainer.errors import ConfigError
from rlhf_trainer.thoughts import CLOSING

ChatMessage = dict[str, Any]
ASSISTANT = "assistant"
TEMPLATE = "the tokenizer's chat template"
QUESTION = {"role": "user", "content": "question"}
ANSWER = {"role": ASSISTANT, "content": "answer-of-the-model"}
"""Made-up messages that show how a template ends an answer; no template writes the answer's text by itself."""
REFUSALS = (LookupError, TemplateError, TypeError, ValueError)
"""Errors that a chat template raises for messages that it does not accept."""
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message for thoughts, which some templates write apart from the content."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a content that are texts."""
MAX_SHAPES = 4096
"""Maximum number of shapes of conversations that a `Template` remembers."""
MARK = re.compile(r"mark\d+(?:call\d+)?end")
"""Pattern of a mark in place of a message's content or of the name of a tool call."""


class BadValueError(Exception):
    """Error for a data column's value of a wrong type; the text follows the row in a sentence: `holds nothing`."""


class Arguments(dict[str, Any]):
    """Arguments of a tool call, a mapping that a template may also write as JSON text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __radd__(self, before: str) -> str:
        return before + str(self)


@dataclass(frozen=True, kw_only=True)
class EndTokens:
    """Tokens that end a response: one set for generation, targets, episodes, evaluation and export."""

    ids: list[int]
    """Ids of the tokens; first comes the one with which the chat template ends an answer."""
    texts: list[str]
    pattern: re.Pattern[str]
    """Pattern of the text from an answer to the end of its turn, such as a space and an end token."""
    unknown: Sequence[int]
    """End tokens of the model folder that the tokenizer lacks; they end no response."""

    def sentence(self) -> str:
        """Return the sentence that names the tokens to the user."""
        named = " or ".join(f"{text} ({token})" for token, text in zip(self.ids, self.texts, strict=True))
        lacking = f"; the tokenizer lacks {self.unknown} of the model's files" if self.unknown else ""
        return f"a response ends with {named}{lacking}"

    def cut(self, ids: list[int]) -> list[int]:
        """Return ids up to the last token that ends a turn, else the last end token; templates write more after it."""
        ends = self.ids[:1] if self.ids[0] in ids else self.ids
        last = max((place for place, token in enumerate(ids) if token in ends), default=len(ids) - 1)
        return ids[: last + 1]


class Template:
    """Chat template of a tokenizer, which refuses a conversation of which it would leave out a message."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: EndTokens | None = None) -> None:
        """Keep the tokenizer. ends: tokens that end an answer, by default those of the tokenizer and its template."""
        self._tokenizer, self.ends = tokenizer, ends or end_tokens(tokenizer)
        self._in_parts = _roles_in_parts(tokenizer)
        alone, whole = (tokenizer("a", add_special_tokens=adds, verbose=False)["input_ids"] for adds in (False, True))
        starts = [start for start in range(len(whole)) if whole[start : start + len(alone)] == alone]
        self._opening: list[int] = whole[: starts[0]] if starts else []
        self._written: dict[str, set[str] | None] = {}

    def render(self, chat: list[ChatMessage], tools: Sequence[Any], *, is_prompt: bool, since: int = 0) -> str:
        """Render a conversation; thoughts and tools may be left out.

        Raises BadValueError if the template refuses the conversation, or leaves out a message from index `since` on.
        """
        try:
            return self._whole(chat, tools, is_prompt, since)
        except BadValueError:  # some templates write calls only beside a content that is None
            bare = [{**each, "content": each["content"] or None} if each.get("tool_calls") else each for each in chat]
            with suppress(BadValueError):
                return self._whole(bare, tools, is_prompt, since)
            raise

    def answer(self, text: str, chat: list[ChatMessage], index: int, tools: Sequence[Any]) -> slice | None:
        """Return where an answer stands in the rendering of its conversation, end token included; None if unknown.

        It starts where its prompt ends or, if `text` has another beginning, where a made-up answer would start.
        """
        for head in (chat[:index], [*chat[:index], ANSWER, *chat[index + 1 :]]):
            with suppress(BadValueError):
                before = self.render(head, tools, is_prompt=True, since=len(head)).partition(ANSWER["content"])[0]
                end = self.ends.pattern.search(text, len(before))
                if end and text.startswith(before):
                    place = slice(len(before), end.end())
                    return None if self._holds_next(place, chat, index, tools) else place
        return None

    def opened(self, ids: list[int]) -> list[int]:
        """Return the ids of a plain text after the tokenizer's opening tokens (BOS); an empty text stays empty."""
        return ids if not ids or ids[: len(self._opening)] == self._opening else [*self._opening, *ids]

    def _holds_next(self, place: slice, chat: list[ChatMessage], index: int, tools: Sequence[Any]) -> bool:
        """Whether the place of an answer also holds the tool's message after it."""
        following = chat[index + 1 :]
        if not following or following[0]["role"] == QUESTION["role"]:
            return False
        marked = [*chat[: index + 1], {**following[0], "content": ANSWER["content"]}, *following[1:]]
        with suppress(BadValueError):
            text = self.render(marked, tools, is_prompt=True, since=index)
            return bool(place.start <= text.find(ANSWER["content"]) < place.stop)
        return False

    def _whole(self, chat: list[ChatMessage], tools: Sequence[Any], is_prompt: bool, since: int) -> str:
        """Render a conversation, also with marks instead of contents: a mark that is missing is a message left out."""
        text = self._applied(chat, tools, is_prompt)
        marks = [_marked(each, n) for n, each in enumerate(chat)]
        texts = json.dumps([marks, list(tools), is_prompt], default=str)
        shape = blake2b(texts.encode(errors="replace"), digest_size=16).hexdigest()
        if shape not in self._written:
            if len(self._written) == MAX_SHAPES:
                self._written.clear()
            self._written[shape] = None  # stays None if the template refuses the marks
            with suppress(BadValueError):
                self._written[shape] = set(MARK.findall(self._applied(marks, tools, is_prompt)))
        written = self._written[shape]
        for each, mark in zip(chat[since:], marks[since:], strict=True):
            is_empty = not each["content"] and not each.get("tool_calls")
            is_there = written is None or is_empty or written.issuperset(MARK.findall(json.dumps(mark, default=str)))
            is_there &= says_all(text, each, with_thoughts=False)
            require(is_there, f"has a message of role {each['role']!r} that {TEMPLATE} leaves out")
        return text

    def _applied(self, chat: list[ChatMessage], tools: Sequence[Any], is_prompt: bool) -> str:
        try:
            given = [_in_parts(each) if each["role"] in self._in_parts else each for each in chat]
            return _applied(self._tokenizer, given, tools=list(tools) or None, add_generation_prompt=is_prompt)
        except REFUSALS as error:  # because of bad tools, or by the template's own rules
            raise BadValueError(f"is refused by {TEMPLATE}: {error}") from error


def end_tokens(tokenizer: PreTrainedTokenizerBase, listed: Sequence[object] = ()) -> EndTokens:
    """Return the end tokens of a tokenizer, of its chat template, and of a model folder, whose ids are `listed`.

    The template's token is the last added token in what it writes after any answer. ConfigError without EOS token.
    """
    if not isinstance(tokenizer.eos_token_id, int):
        raise ConfigError(f"the tokenizer {tokenizer.name_or_path!r} has no end-of-text token")
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    rest = _after_any_answer(tokenizer)
    stops = [(rest.rfind(text) + len(text), number) for number, text in added.items() if text in rest]
    closing, turn = max(stops, default=(0, tokenizer.eos_token_id))
    numbers = dict.fromkeys([turn, tokenizer.eos_token_id, *(each for each in listed if isinstance(each, int))])
    known = {*range(len(tokenizer)), *added}
    ids = [each for each in numbers if each in known]
    texts = list(map(str, tokenizer.convert_ids_to_tokens(ids)))
    forms = [re.escape(rest[:closing]), *map(r"\s*{}".format, map(re.escape, texts))]
    pattern = re.compile("|".join(filter(None, forms)))
    return EndTokens(ids=ids, texts=texts, pattern=pattern, unknown=sorted(numbers.keys() - known))


def _after_any_answer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the common beginning of the texts that a chat template writes after a last and after an earlier answer."""
    roles = _roles_in_parts(tokenizer)
    question, answer = (_in_parts(each) if each["role"] in roles else each for each in (QUESTION, ANSWER))
    rests = list[str]()
    with suppress(*REFUSALS):
        for chat in ([question, answer], [question, answer, question]) if tokenizer.chat_template else ():
            rests.append(_applied(tokenizer, chat).partition(ANSWER["content"])[2])
    pairs = zip(*rests, strict=False) if len(rests) > 1 else ()
    return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _roles_in_parts(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the roles whose contents a chat template writes only as lists of parts, as some vision models do."""
    chat: list[ChatMessage] = []
    found = set[str]()
    for message in (QUESTION, ANSWER) if tokenizer.chat_template else ():
        forms = (message, _in_parts(message))
        written = [form for form in forms if _is_written(tokenizer, [*chat, form])]
        if written == [forms[1]]:
            # the other roles of a prompt get the same form as the user
            found |= {message["role"], *(("system", "developer", "tool") if message is QUESTION else ())}
        chat.append((written or forms)[0])
    return found


def _is_written(tokenizer: PreTrainedTokenizerBase, chat: list[ChatMessage]) -> bool:
    """Whether a chat template writes the text of the last message, whose content may be in parts."""
    content = chat[-1]["content"]
    text = str(content[0]["text"] if isinstance(content, list) else content)
    with suppress(*REFUSALS):
        return text in _applied(tokenizer, chat)
    return False


def _applied(tokenizer: PreTrainedTokenizerBase, chat: list[ChatMessage], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(chat, tokenize=False, **options))


def _in_parts(message: ChatMessage) -> ChatMessage:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}] if content else content}


def read_message(value: object) -> ChatMessage:
    """Return a message with its content as text, its tool calls as lists and dicts, and without nulls.

    A table writes null where only other rows have a key. Arguments may be JSON text, as OpenAI writes them.
    """
    if not isinstance(value, dict):
        raise BadValueError(f"holds {kind_of(value)}, not a text or a message")
    message: ChatMessage = _without_nulls(value)
    calls = list(map(_call, read_tools(message.pop("tool_calls", None))))
    content = message.get("content", "" if calls else None)
    if isinstance(content, list):
        content = "".join(_text_of(part, message.get("role")) for part in content)
    are_texts = {type(message.get("role")), type(content)} == {str}
    require(are_texts, "has a message whose 'role' or 'content' is not a text")
    return {**message, "content": content, **({"tool_calls": calls} if calls else {})}


def _text_of(part: object, role: object) -> str:
    """Return the text of a part of a content; BadValueError for another part, such as an image."""
    found = part if isinstance(part, dict) else {"type": type(part).__name__}
    kind = found.get("type")
    require(kind in TEXT_PARTS, f"has a message of role {role!r} with a part of type {kind!r}; only texts are read")
    return str(found.get("text") or "")


def read_tools(value: object) -> list[Any]:
    """Return tools or tool calls without nulls; they may be JSON text, one by one or all together."""
    try:
        found = json.loads(value or "null") or [] if isinstance(value, str) else _without_nulls(value or [])
        found = [json.loads(each) if isinstance(each, str) else each for each in found]
    except (RecursionError, TypeError, ValueError):
        found = [None]
    are_mappings = all(isinstance(each, dict) and isinstance(each.get("function", each), dict) for each in found)
    require(are_mappings, "holds tools or tool calls that are no list of mappings")
    return found


def name_of(tool: Mapping[str, Any]) -> str:
    """Return the name of the function in a tool or in a tool call; empty if it has none."""
    return str(tool.get("function", tool).get("name") or "")


def says_all(text: str, message: ChatMessage, *, with_thoughts: bool = True) -> bool:
    """Whether a text holds a message's content and names of calls, but for white space and JSON's escapes."""
    content = message["content"] or ""
    texts = [content, *map(message.get, THOUGHT_KEYS)] if with_thoughts else [re.split(CLOSING, content)[-1]]
    parts = [str(part) for part in (*texts, *map(name_of, message.get("tool_calls", ()))) if part]
    return all(part.strip() in text or _letters(part) in _letters(text) for part in parts)


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BadValueError(otherwise)


def kind_of(value: object) -> str:
    return "nothing" if value is None or value == [] else f"a value of type {type(value).__name__}"


def _marked(message: ChatMessage, number: int) -> ChatMessage:
    """Return a message with marks instead of its content and the names of its calls; no content stays none."""
    calls = [
        _with_function(call, {**call.get("function", call), "name": f"mark{number}call{place}end"})
        for place, call in enumerate(message.get("tool_calls", ()))
    ]
    content = f"mark{number}end" if message["content"] or not calls else message["content"]
    return {**message, "content": content, **({"tool_calls": calls} if calls else {})}


def _with_function(call: dict[str, Any], function: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": function} if "function" in call else function


def _letters(text: str) -> str:
    return re.sub(r"\\[nrt]|[\W_]", "", text)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with Arguments, if its arguments are a dict or the JSON text of one."""
    inner = call.get("function", call)
    arguments = inner.get("arguments")
    with suppress(RecursionError, ValueError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    changed = {**inner, "arguments": Arguments(arguments)} if isinstance(arguments, dict) else inner
    return _with_function(call, changed)
