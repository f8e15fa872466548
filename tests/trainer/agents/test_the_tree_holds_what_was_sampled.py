"""10,000 random conversations: a sampled id is in the tree once, after the ids that the engine had as its prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer

from rlhf_trainer.agents.conversation import Call, Conversation
from rlhf_trainer.agents.openai_format import RefusalError, Request
from rlhf_trainer.chat import ChatMessage
from rlhf_trainer.data.turns import TurnEncoder
from rlhf_trainer.errors import DataError
from rlhf_trainer.generation.vllm_engine import Response
from tests.trainer.agents.stage import TEMPLATE, branch_of
from tests.trainer.tiny import EXAMPLE_MODEL

END, TURN = 2, 3
CONVERSATIONS, ENCODED = 3_000, 60
"""Random conversations with an encoder of the test, and with a real tokenizer and its template."""


class Letters:
    """Stands for a `TurnEncoder`: a letter has one id or, for every other answer, another that no text gets."""

    def prompt(self, given: str | list[ChatMessage], _: Sequence[Any] = ()) -> list[int]:
        if isinstance(given, str):
            return self._ids(given)
        return [id_ for each in given for id_ in (TURN, *self._ids(each["role"][0] + each["content"]))] + [TURN]

    def observation(self, given: str | list[ChatMessage], *, ended: bool = True) -> list[int]:
        return self._ids(given) if isinstance(given, str) else [END] * (not ended) + self.prompt(given)

    def answer(self, tokens: Sequence[int]) -> str:
        return "".join(chr(96 + token % 100) for token in tokens if token != END)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [self.answer([token]) for token in tokens]

    def _ids(self, text: str) -> list[int]:
        return [ord(letter) - 96 + 100 for letter in text]


def sampled(drawn: random.Random, encoder: Any, most: int) -> Response:
    """What an engine could write: ids that the text of the answer would not be encoded as, too."""
    if isinstance(encoder, Letters):
        tokens = [drawn.choice((100, 200)) + drawn.randrange(1, 4) for _ in range(drawn.randrange(1, 5))]
    else:
        tokens = [drawn.randrange(3, 512) for _ in range(drawn.randrange(1, 9))]
    tokens = [*tokens, END][:most]
    return Response(
        tokens=tokens,
        log_probs=[-drawn.random() - 0.01 for _ in tokens],
        finished=tokens[-1] == END,
        versions=[drawn.randrange(1, 9)] * len(tokens),
    )


def said(drawn: random.Random) -> str:
    return "".join(drawn.choice("abc") for _ in range(drawn.randrange(1, 4)))


def next_request(drawn: random.Random, calls: Sequence[Call]) -> Request:
    """A first request, one that goes on from a call, the same again, or one whose history was changed."""
    most = drawn.choice((None, None, None, 2))
    answered = [call for call in calls if call.answer]
    if not answered:
        start = [{"role": "user", "content": said(drawn)}] if drawn.random() < 0.8 else said(drawn)
        return Request(prompt=start, max_tokens=most)
    call = drawn.choice(answered)
    assert call.answer
    before, kind = call.request.prompt, drawn.randrange(6)
    if kind == 0:
        return Request(prompt=before, max_tokens=most)
    if isinstance(before, str):
        return Request(prompt=before[kind == 1 :] + call.answer["content"] + said(drawn), max_tokens=most)
    echo = {**call.answer, "content": call.answer["content"] + "b" * (kind == 1), "refusal": "none"}
    new = {"role": drawn.choice(("user", "tool")), "content": said(drawn)}
    return Request(prompt=[*before[kind == 2 and len(before) > 2 :], echo, new], max_tokens=most)


def play(drawn: random.Random, encoder: Any) -> tuple[Conversation, list[tuple[Call, Response, int]]]:
    """A conversation, and its answered calls: (call, what the engine wrote, index of the answer in the tree)."""
    limits = {"prompt_tokens": 40, "tokens": drawn.choice((12, 60, 400)), "calls": drawn.randrange(1, 9)}
    conversation = Conversation(encoder, **limits)
    calls: list[Call] = []
    under_way: list[Call] = []
    found: list[tuple[Call, Response, int]] = []
    for _ in range(12):
        if under_way and drawn.random() < 0.6:
            call = under_way.pop(drawn.randrange(len(under_way)))
            response = sampled(drawn, encoder, call.max_tokens)
            start = len(conversation.tree.tokens)
            try:
                conversation.end(call, response)
            except RefusalError:
                continue
            found.append((call, response, start))
        else:
            try:
                call = conversation.begin(next_request(drawn, calls))
            except RefusalError:
                continue
            calls.append(call)
            under_way.append(call)
    return conversation, found


def check(conversation: Conversation, found: Sequence[tuple[Call, Response, int]]) -> None:
    tree = conversation.tree
    assert all(parent < index for index, parent in enumerate(tree.parents))
    written = [False] * len(tree.tokens)
    for call, response, start in found:
        count = len(call.written)
        assert list(call.written) == list(response.tokens[:count])
        assert count == len(response.tokens) or conversation.limit
        place = start + count - 1
        branch = branch_of(tree.parents, place)
        assert [tree.tokens[each] for each in branch] == [*call.prompt, *call.written]
        assert branch[-count:] == list(range(start, start + count))
        assert tree.log_probs[start : start + count] == response.log_probs[:count]
        assert tree.versions[start : start + count] == response.versions[:count]
        written[start : start + count] = [True] * count
    assert tree.written == written, "a sampled id is there once, and no other id is learned"
    assert not any(value for value, own in zip(tree.log_probs, written, strict=True) if not own)
    twice = [(tree.parents[each], tree.tokens[each]) for each in range(len(tree.tokens)) if not written[each]]
    assert len(twice) == len(set(twice)), "a prefix of two prompts is there once"


def test_random_conversations_become_trees() -> None:
    roots = branches = cut = 0
    texts = set[tuple[int, ...]]()
    for number in range(CONVERSATIONS):
        conversation, found = play(random.Random(number), Letters())
        check(conversation, found)
        roots += conversation.tree.parents.count(-1) > 1
        branches += conversation.tree.branches > 1
        cut += bool(conversation.limit)
        most = len(conversation.prompt) + conversation._most
        response = conversation.finish(finished=True)
        first, tree = len(conversation.prompt), conversation.tree
        assert len(tree.tokens) == first + len(response.tokens) <= most
        assert sum(tree.written) == sum(len(call.written) for call, *_ in found), "no answer is dropped"
        assert tree.parents[:first] == list(range(-1, first - 1))
        leaves = {*range(len(tree.tokens))} - {*tree.parents}
        assert all(tree.written[leaf] for leaf in leaves), "each branch is learned from"
        for call, *_ in found:
            texts.add((*call.prompt, *call.written))
        assert {tuple(tree.tokens[each] for each in branch_of(tree.parents, leaf)) for leaf in leaves} <= texts
        texts.clear()
    assert min(roots, branches, cut) > CONVERSATIONS / 100, "all kinds are there"


def test_a_real_tokenizer_gives_such_trees_too() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(EXAMPLE_MODEL))
    tokenizer.chat_template = TEMPLATE
    encoder = TurnEncoder(tokenizer, chat_template="Never")
    branches = 0
    for number in range(ENCODED):
        conversation, found = play(random.Random(number), encoder)
        check(conversation, found)
        branches += conversation.tree.branches > 1
    assert branches > 3


@pytest.fixture
def talk() -> Conversation:
    return Conversation(Letters(), prompt_tokens=20, tokens=60, calls=9)  # type: ignore[arg-type]


def answer(talk: Conversation, prompt: Any, tokens: Sequence[int], **options: Any) -> Call:
    call = talk.begin(Request(prompt=prompt, **options))
    log_probs, versions = [-1.0] * len(tokens), [1] * len(tokens)
    finished = tokens[-1] == END
    talk.end(call, Response(tokens=tokens, log_probs=log_probs, finished=finished, versions=versions))
    return call


USER = {"role": "user", "content": "a"}


def test_a_call_goes_on_from_the_ids_that_were_sampled(talk: Conversation) -> None:
    first = answer(talk, [USER], [201, 102, END])
    assert first.prompt == [TURN, 121, 101, TURN]
    echo = {"role": "assistant", "content": " ab ", "annotations": []}
    second = answer(talk, [USER, echo, USER], [103, END])
    assert second.prompt == [*first.prompt, 201, 102, END, TURN, 121, 101, TURN]
    assert talk.tree.branches == 1


def test_an_answer_without_its_end_gets_one_from_the_template(talk: Conversation) -> None:
    first = answer(talk, [USER], [201, 102], max_tokens=2)
    second = answer(talk, [USER, {"role": "assistant", "content": "ab"}, USER], [103, END])
    assert second.prompt[: len(first.prompt) + 3] == [*first.prompt, 201, 102, END]
    assert not talk.limit, "the program asked for no more"


def test_a_changed_history_is_a_branch_that_is_encoded(talk: Conversation) -> None:
    first = answer(talk, [USER], [201, END])
    other = answer(talk, [USER, {"role": "assistant", "content": "c"}, USER], [102, END])
    assert other.prompt == [TURN, 121, 101, TURN, 97 - 96 + 100, 103, TURN, 121, 101, TURN]
    assert talk.tree.branches == 2
    assert talk.tree.parents[len(first.prompt) + 2] == len(first.prompt) - 1


def test_messages_that_cannot_be_written_alone_make_a_branch(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> list[int]:
        raise DataError("gave a conversation that is refused")

    monkeypatch.setattr(talk._encoder, "observation", refused)
    for prompt in ([USER], [USER, {"role": "assistant", "content": "a"}, USER]):
        answer(talk, prompt, [201, END])
    assert (talk.encoded_again, talk.tree.branches) == (1, 2)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [("abcabcc", [101, 102, 203, 201, 102, 103, 103]), ("abcacc", [101, 102, 103, 101, 103, 103])],
    ids=["with its stop", "without"],
)
def test_a_text_goes_on_only_with_its_stop(talk: Conversation, prompt: str, ids: Sequence[int]) -> None:
    first = answer(talk, "ab", [203, 201, 102], stop=["b"])
    assert (first.answer or {})["content"] == "ca"
    assert answer(talk, prompt, [101, END]).prompt == ids


@pytest.mark.parametrize("asks", [True, False])
def test_tokens_are_decoded_alone_for_log_probabilities_only(talk: Conversation, asks: bool) -> None:
    call = talk.begin(Request(prompt=[USER], has_log_probs=asks))
    response = Response(tokens=[101, END], log_probs=[-1.0, -2.0], finished=True, versions=[1, 1])
    shown = talk.end(call, response)["choices"][0]["logprobs"]
    assert (shown and [each["token"] for each in shown["content"]]) == (["a", ""] if asks else None)


def test_calls_at_once_share_the_room(talk: Conversation) -> None:
    calls = [talk.begin(Request(prompt=[USER])) for _ in range(3)]
    tokens = [101] * 40
    response = Response(tokens=tokens, log_probs=[-1.0] * 40, finished=False, versions=[1] * 40)
    assert talk.end(calls[0], response)["choices"][0]["finish_reason"] == "length"
    assert talk.end(calls[1], response)["usage"]["completion_tokens"] == 20
    with pytest.raises(RefusalError, match=r"other calls .* have taken all of data\.maxResponseTokens"):
        talk.end(calls[2], response)
    assert len(talk.finish(finished=False).tokens) == 60


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("a" * 21, r"the prompt has 21 tokens, more than data\.maxPromptTokens \(20\)"),
        ("", "the request has a prompt without tokens"),
    ],
)
def test_a_first_prompt_fits_or_is_refused(talk: Conversation, prompt: str, sentence: str) -> None:
    with pytest.raises(RefusalError, match=sentence):
        talk.begin(Request(prompt=prompt))
    assert bool(talk.limit) is bool(prompt)


@pytest.mark.parametrize("options", [{"prompt": "a" * 1281}, {"prompt": [USER], "tools": [{"a": {"b" * 1280: []}}]}])
def test_a_long_request_is_refused_before_it_is_encoded(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder: Any = Letters()
    talk = Conversation(encoder, prompt_tokens=20, tokens=60, calls=9)
    answer(talk, "a", [101, END])
    monkeypatch.setattr(encoder, "prompt", None)
    with pytest.raises(RefusalError, match="the request has more than 1280 characters, 16 for each token"):
        talk.begin(Request(**options))


def test_calls_and_tokens_are_limited() -> None:
    encoder: Any = Letters()
    talk = Conversation(encoder, prompt_tokens=20, tokens=60, calls=1)
    answer(talk, "a", [101, END])
    with pytest.raises(RefusalError, match=r"has had its 1 calls \(rollout\.maxTurns\)"):
        talk.begin(Request(prompt="a"))
    talk = Conversation(encoder, prompt_tokens=20, tokens=4, calls=9)
    answer(talk, "a", [101, END])
    with pytest.raises(RefusalError, match=r"no room for an answer in data\.maxResponseTokens \(4\)"):
        talk.begin(Request(prompt="abbbb"))
    assert talk.limit
