"""The calls of an episode: each gets its prompt's token ids, and the tokens of all calls become a tree.

No answer is encoded again. A call that continues an earlier call reuses its ids; only new messages are encoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress
from typing import Any

from rlhf_trainer.agents.openai_format import RefusalError, Request, answer_message, few_names, object_of, refusing
from rlhf_trainer.chat import ASSISTANT, ChatMessage, name_of, read_message
from rlhf_trainer.data.tokens import Ids
from rlhf_trainer.data.turns import TurnEncoder
from rlhf_trainer.errors import DataError
from rlhf_trainer.generation.vllm_engine import Response

CHARACTERS = 16
"""Most characters of a request for each token that an episode may have."""


@dataclass
class Tree:
    """Tokens of an episode, each once, in the order in which they came; the lists have an entry for each token."""

    tokens: Ids = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """Index of each token's predecessor, less than the token's own index; -1: the token has none."""
    log_probs: list[float] = field(default_factory=list)
    """Log-probability of the tokens that the model wrote; 0 on all others."""
    versions: list[int] = field(default_factory=list)
    """Policy version of the weights that wrote a token; 0 on all others."""
    written: list[bool] = field(default_factory=list)

    def find(self, ids: Ids) -> tuple[int, int]:
        """Return (index of the last token, length) of the longest prefix of `ids` in the tree; (-1, 0) for none."""
        lengths, best = {-1: 0}, (-1, 0)
        for index, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            length = lengths.get(parent, len(ids))
            if length < len(ids) and ids[length] == token:
                lengths[index] = length + 1
                best = max(best, (index, length + 1), key=lambda each: each[1])
        return best

    def grow(self, parent: int, tokens: Sequence[int], answer: Response | None = None) -> int:
        """Append tokens after `parent`; returns the last one's index. answer: the model's response if it wrote them."""
        count, size = len(tokens), len(self.tokens)
        self.tokens += tokens
        self.parents += [parent, *range(size, size + count - 1)][:count]
        self.log_probs += answer.log_probs[:count] if answer else [0.0] * count
        self.versions += answer.versions[:count] if answer else [0] * count
        self.written += [answer is not None] * count
        return size + count - 1 if count else parent

    def prune(self) -> None:
        """Drop the tokens after which the model wrote nothing, such as the prompt of a call without an answer."""
        kept = list(self.written)
        for index in reversed(range(len(kept))):
            if kept[index] and self.parents[index] >= 0:
                kept[self.parents[index]] = True
        places = [count - 1 for count in accumulate(kept)]
        self.parents = [parent if parent < 0 else places[parent] for parent in self.parents]
        columns: tuple[list[Any], ...] = (self.tokens, self.parents, self.log_probs, self.versions, self.written)
        for each in columns:
            each[:] = compress(each, kept)

    @property
    def branches(self) -> int:
        """Number of tokens that no other token follows."""
        return len(self.tokens) - len({*self.parents} - {-1})


@dataclass
class Call:
    """Call of the model, under way or answered."""

    request: Request
    prompt: Ids
    leaf: int
    """Index in the tree of the prompt's last token."""
    max_tokens: int
    number: int
    answer: ChatMessage | None = None
    written: Sequence[int] = ()
    """Token ids of the answer."""
    ended: bool = False
    stop: str = ""
    """Text of the request's `stop` that ended the answer and is not shown."""

    def rest_of(self, request: Request) -> list[ChatMessage] | str:
        """Return the messages or text by which a request continues this call and its answer; empty if it does not."""
        mine, prompt, answer = self.request.prompt, request.prompt, self.answer
        if answer and isinstance(mine, str) and isinstance(prompt, str):
            before = mine + answer["content"] + self.stop
            return prompt[len(before) :] if prompt.startswith(before) else ""
        if not answer or isinstance(mine, str) or isinstance(prompt, str) or request.tools != self.request.tools:
            return ""
        rest = prompt[len(mine) + 1 :]
        goes_on = bool(rest) and prompt[: len(mine)] == mine and rest[0]["role"] != ASSISTANT
        return rest if goes_on and _content(prompt[len(mine)]) == _content(answer) else ""


def _content(message: ChatMessage) -> tuple[Any, ...]:
    """Return (role, text, tool calls) of a message: the parts of an answer that clients send back unchanged."""
    calls = message.get("tool_calls", ())
    called = [(name_of(each), each.get("function", each).get("arguments")) for each in calls]
    return message["role"], message["content"].strip(), called


class Conversation:
    """Calls of one episode, within the limits of calls and tokens."""

    def __init__(self, encoder: TurnEncoder, *, prompt_tokens: int, tokens: int, calls: int) -> None:
        """Begin an episode; encoder: encodes messages by the chat template, and texts as they are.

        prompt_tokens: most tokens of the first call's prompt; tokens: most tokens of the tree after that prompt.
        """
        self._encoder, self._most_prompt, self._most, self._most_calls = encoder, prompt_tokens, tokens, calls
        self._most_characters = CHARACTERS * (prompt_tokens + tokens)
        self._calls: list[Call] = []
        self.tree, self._first = Tree(), 0
        self.limit = ""
        """Sentence on the first limit that a call has met; empty if none has."""
        self.encoded_again = 0
        """Number of calls that continue an earlier call, but were encoded as a whole."""
        self.ignored: set[str] = set()
        """Parameters of calls that were ignored: other sampling, and tools that the chat template does not write."""

    @property
    def answered(self) -> int:
        return sum(call.answer is not None for call in self._calls)

    @property
    def prompt(self) -> Ids:
        """Token ids of the first call's prompt; after `finish` that of the first call with an answer."""
        return self.tree.tokens[: self._first]

    def begin(self, request: Request) -> Call:
        """Return the call of a request, with its prompt's ids. RefusalError beyond a limit, or for a bad prompt."""
        if len(self._calls) == self._most_calls:
            raise self._limited(f"the episode has had its {self._most_calls} calls (rollout.maxTurns)")
        with refusing():
            if request.characters > self._most_characters:
                limits = f"{CHARACTERS} for each token of data.maxPromptTokens and data.maxResponseTokens"
                raise self._limited(f"the request has more than {self._most_characters} characters, {limits}")
            ids = self._ids(request)
        if not ids:
            raise RefusalError(400, "the request has a prompt without tokens")
        if not self.tree.tokens and len(ids) > self._most_prompt:
            sentence = f"the prompt has {len(ids)} tokens, more than data.maxPromptTokens ({self._most_prompt})"
            raise self._limited(sentence)
        parent, known = self.tree.find(ids)
        room = self._room - (len(ids) - known if self.tree.tokens else 0)
        if room < 1:
            raise self._limited(f"the episode has no room for an answer in data.maxResponseTokens ({self._most})")
        self.ignored = {*few_names([*self.ignored, *request.ignored])}
        leaf = self.tree.grow(parent, ids[known:])
        self._first = self._first or len(ids)
        call = Call(request, ids, leaf, min(room, request.max_tokens or room), len(self._calls))
        self._calls.append(call)
        return call

    def end(self, call: Call, response: Response) -> dict[str, Any]:
        """Add the engine's response to the tree, and return the call's answer as JSON.

        Calls that are answered at the same time share the room for tokens; an answer is cut where the room ends.
        """
        tokens = response.tokens[: self._room]
        if not tokens:
            raise self._limited("other calls of the episode have taken all of data.maxResponseTokens")
        self.tree.grow(call.leaf, tokens, response)
        call.ended, call.written = response.finished and len(tokens) == len(response.tokens), tokens
        text = self._encoder.answer(tokens)
        for stop in call.request.stop:
            text, found, _ = text.partition(stop)
            call.stop = found or call.stop
        is_stopped = call.ended or bool(call.stop)
        if not is_stopped and len(tokens) != call.request.max_tokens:
            self.limit = self.limit or "an answer was cut off by data.maxResponseTokens"
        message = answer_message(text, may_call=bool(call.request.tools))
        call.answer = read_message(message)
        pieces = self._encoder.pieces(tokens) if call.request.has_log_probs else []
        return object_of(
            call.request,
            message,
            reason="stop" if is_stopped else "length",
            tokens=(len(call.prompt), len(tokens)),
            log_probs=list(zip(pieces, response.log_probs[: len(pieces)], strict=True)),
        )

    def finish(self, *, finished: bool) -> Response:
        """Return the tree's tokens after `prompt` as a response; the conversation is over."""
        tree = self.tree
        tree.prune()
        is_later = (tree.written[index] or parent != index - 1 for index, parent in enumerate(tree.parents))
        self._first = first = next((index for index, later in enumerate(is_later) if later), 0)
        return Response(
            tokens=tree.tokens[first:],
            log_probs=tree.log_probs[first:],
            finished=finished,
            versions=tree.versions[first:],
            written=tree.written[first:],
            parents=tree.parents[first:],
        )

    @property
    def _room(self) -> int:
        """Number of tokens that the tree may still get."""
        return self._most - (len(self.tree.tokens) - self._first)

    def _ids(self, request: Request) -> Ids:
        """Return the ids of a request's prompt; the ids of the longest earlier call that it continues are reused."""
        found = [(call, rest) for call in reversed(self._calls) if (rest := call.rest_of(request))]
        if found:
            call, rest = min(found, key=lambda each: len(each[1]))
            try:
                return [*call.prompt, *call.written, *self._encoder.observation(rest, ended=call.ended)]
            except DataError:  # the template cannot write the new messages alone
                self.encoded_again += 1
        ids = self._encoder.prompt(request.prompt, request.tools)
        if request.tools and ids == self._encoder.prompt(request.prompt):
            self.ignored.add("tools")
        return ids

    def _limited(self, sentence: str) -> RefusalError:
        self.limit = self.limit or sentence
        return RefusalError(400, sentence)
