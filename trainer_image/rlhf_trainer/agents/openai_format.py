"""OpenAI's format: reads the requests of programs as `Request`, and writes answers as JSON."""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal
from uuid import uuid4

from rlhf_trainer.chat import ASSISTANT, BadValueError, ChatMessage, kind_of, read_message, read_tools, require
from rlhf_trainer.environments.tools import CALL
from rlhf_trainer.errors import DataError

MODEL = "policy"
"""Name of the trained model in requests."""
CHAT, COMPLETIONS, REWARD = "/v1/chat/completions", "/v1/completions", "/v1/reward"
"""Paths of requests for a chat completion, for a completion of a text, and to post a reward."""
ONLY: Mapping[str, object] = {"n": 1, "best_of": 1, "echo": False, "suffix": "", "top_logprobs": 0}
"""Parameter of a request -> the only value besides null that is served; others need another kind of answer."""
KNOWN = {
    *("model", "messages", "prompt", "tools", "max_tokens", "max_completion_tokens", "stop", "stream"),
    *("stream_options", "logprobs", "user", "metadata", "store", *ONLY),
}
"""Parameters of a request that are read, or that change no answer."""
NEUTRAL: Mapping[str, object] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
}
"""Parameter of a request that is ignored -> its value that changes nothing, besides null."""
NAME, OTHERS, MAX_NAMES = re.compile(r"\w{1,64}"), "others", 16
"""Pattern of parameters' names that are shown, the word for all other names, and the most names that are shown."""
MAX_STOPS, MAX_NESTING = 16, 64
"""Most texts of `stop`, and most levels of mappings and lists in messages, tools and arguments of calls."""


class RefusalError(Exception):
    """Error for a request that gets no answer; its text is a sentence for the program."""

    def __init__(self, status: int, sentence: str) -> None:
        """status: code of HTTP."""
        super().__init__(sentence)
        self.status = status

    @property
    def body(self) -> dict[str, Any]:
        """Error object as OpenAI's clients expect it."""
        return {"error": {"message": str(self), "type": "invalid_request_error", "param": None, "code": None}}


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request for an answer of the model."""

    prompt: list[ChatMessage] | str
    """Messages (chat completions) or a text (completions)."""
    tools: Sequence[Any] = ()
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    streams: bool = False
    has_log_probs: bool = False
    ignored: Sequence[str] = ()
    """Parameters that ask for other answers than the job's sampling gives."""

    @property
    def characters(self) -> int:
        """Number of characters of prompt and tools; BadValueError if they are nested too deep."""
        return sum(map(len, texts_in([self.prompt, self.tools])))


@contextmanager
def refusing() -> Iterator[None]:
    """Turn any error of the block into a RefusalError: a program's request fails alone, whatever is in it."""
    try:
        yield
    except RefusalError:
        raise
    except (BadValueError, DataError) as error:
        raise RefusalError(400, f"the request {error}") from error
    except Exception as error:
        raise RefusalError(400, f"the request cannot be read: {type(error).__name__}") from error


def texts_in(value: object) -> list[str]:
    """Return the keys and texts of a JSON value; BadValueError if it has more than MAX_NESTING levels."""
    texts, level = list[str](), [value]
    for _ in range(MAX_NESTING):
        texts += [each for each in level if isinstance(each, str)]
        inner = ([*each, *each.values()] if isinstance(each, dict) else each for each in level)
        level = [value for values in inner if isinstance(values, list) for value in values]
    require(not level, f"is nested more than {MAX_NESTING} deep")
    return texts


@refusing()
def read_request(path: str, body: Mapping[str, Any], *, model: str, sampling: Mapping[str, object]) -> Request:
    """Parse a request of a program; RefusalError if the proxy cannot serve it.

    model: second name of the model, besides MODEL; sampling: the job's sampling by the names of OpenAI and vLLM.
    """
    if body.get("model") not in (MODEL, model):
        raise RefusalError(404, f"there is no model {body.get('model')!r:.80}, expected {MODEL!r}")
    own = {**NEUTRAL, **sampling}
    for name, only in ONLY.items():
        require(body.get(name) in (None, only), f"has {name} {body.get(name)!r:.60}, expected {only!r}")
    log_probs = body.get("logprobs")
    require(log_probs in (None, 0, 1), "asks for log-probabilities of other tokens than the answer's")
    return Request(
        prompt=_messages(body.get("messages")) if path == CHAT else _text(body.get("prompt")),
        tools=read_tools(body.get("tools")),
        max_tokens=_max_tokens(body),
        stop=_stops(body.get("stop")),
        streams=bool(body.get("stream")),
        has_log_probs=log_probs is not None and log_probs is not False,
        ignored=few_names(each for each in body if each not in KNOWN and body[each] not in (None, own.get(each))),
    )


def few_names(names: Iterable[str]) -> list[str]:
    """Return at most MAX_NAMES of the names that a program has sent, sorted; OTHERS stands for the rest."""
    given = {*names}
    found = sorted(each for each in given - {OTHERS} if NAME.fullmatch(each))[:MAX_NAMES]
    return [*found, *[OTHERS][: len(given) - len(found)]]


def _messages(given: Any) -> list[ChatMessage]:
    require(isinstance(given, list) and bool(given), f"holds {kind_of(given)} as messages, expected a list")
    return [read_message(each) for each in given]


def _text(given: Any) -> str:
    text = given[0] if isinstance(given, list) and len(given) == 1 else given
    require(isinstance(text, str), f"holds {kind_of(text)} as prompt, expected one text")
    return str(text)


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    given = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    are_counts = all(type(each) is int and each > 0 for each in given)
    require(are_counts, f"has {given!r:.60} as most tokens, expected a whole number, at least 1")
    return min(given, default=None)


def _stops(given: Any) -> list[str]:
    stops = [given] if isinstance(given, str) else given or []
    are_texts = isinstance(stops, list) and all(isinstance(each, str) and each for each in stops)
    require(are_texts and len(stops) <= MAX_STOPS, f"has stop {given!r:.60}, expected up to {MAX_STOPS} texts")
    return list(stops)


def answer_message(text: str, *, may_call: bool) -> ChatMessage:
    """Return an answer as a message; its calls of tools are `tool_calls`, unless one of them cannot be read."""
    calls = list[dict[str, Any]]()
    for each in CALL.findall(text) if may_call else ():
        try:
            call = json.loads(each)
            texts_in(call)  # a call that is nested too deep for a request is text
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments") or {})}
        except (BadValueError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
            return {"role": ASSISTANT, "content": text}
        calls.append({"index": len(calls), "id": f"call_{uuid4().hex}", "type": "function", "function": function})
    if not calls:
        return {"role": ASSISTANT, "content": text}
    return {"role": ASSISTANT, "content": CALL.sub("", text).strip() or None, "tool_calls": calls}


def object_of(
    request: Request,
    message: ChatMessage,
    *,
    reason: Literal["stop", "length"],
    tokens: tuple[int, int],
    log_probs: Sequence[tuple[str, float]],
) -> dict[str, Any]:
    """Return the JSON object of an answer; for a stream, the JSON of its only event.

    message: the answer; with completions its content is the text; tokens: counts of prompt tokens and answer tokens;
    log_probs: text and log-probability of each token of the answer, which are sent if the request asks for them.
    """
    is_chat = not isinstance(request.prompt, str)
    kind = f"chat.completion{'.chunk' * request.streams}" if is_chat else "text_completion"
    name = "delta" if request.streams else "message"
    content = {name: message} if is_chat else {"text": message["content"]}
    shown = (_log_probs if is_chat else _log_probs_of_text)(log_probs) if request.has_log_probs else None
    why = "tool_calls" if "tool_calls" in message and reason == "stop" else reason
    return {
        "id": f"{kind}-{uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, **content, "finish_reason": why, "logprobs": shown}],
        "usage": {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)},
    }


def _log_probs(tokens: Sequence[tuple[str, float]]) -> dict[str, Any]:
    given = [{"token": piece, "logprob": each, "bytes": list(piece.encode(errors="replace"))} for piece, each in tokens]
    return {"content": [{**each, "top_logprobs": []} for each in given]}


def _log_probs_of_text(tokens: Sequence[tuple[str, float]]) -> dict[str, Any]:
    pieces, log_probs = [piece for piece, _ in tokens], [each for _, each in tokens]
    offsets = list(accumulate(map(len, pieces), initial=0))[:-1]
    return {"tokens": pieces, "token_logprobs": log_probs, "top_logprobs": None, "text_offset": offsets}
