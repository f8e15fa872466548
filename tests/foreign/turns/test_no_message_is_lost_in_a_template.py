"""The content of each message is in the rendering, or the row is bad and says which role is missing."""

from __future__ import annotations

import pytest

from rlhf_trainer.chat import BadValueError, Template
from rlhf_trainer.data.tokens import NO_TOOLS, UNLEARNED
from rlhf_trainer.data.turns import TurnEncoder
from rlhf_trainer.errors import DataError
from tests.each import each_case
from tests.foreign.turns.encoding import asked, encoder_of, ends_of, fault, learned
from tests.foreign.turns.families import ADD, CALL, CALLS, FAMILIES, TALK, TOOL_TALK, tokenizer_of

TOLD = {"role": "tool", "content": "7"}
LEFT_OUT = "has a message of role 'tool' that the tokenizer's chat template leaves out"
TOOLS = [{"type": "function", "function": {"name": "subtract", "parameters": {}}}]


def test_what_a_tool_says_is_not_lost() -> None:
    """The tool's text also stands in the answer, so only its place shows that the message is left out."""
    assert fault(encoder_of(FAMILIES["phi"], tokenizer_of(FAMILIES["phi"]), asked(TOLD))) == LEFT_OUT


@each_case("name", ["chatml", "thinking", "llama", "glm", "harmony"])
@each_case("content", ["7", '{"is": "7 °C",\n "no": null}', "  7\n", "7 \u4e03 \U0001f600", "*"])
def test_what_is_written_is_found_in_any_form(name: str, content: str) -> None:
    tokenizer = tokenizer_of(FAMILIES[name])
    assert fault(encoder_of(FAMILIES[name], tokenizer, asked({"role": "tool", "content": content}))) == ""


def test_a_system_message_may_not_vanish() -> None:
    family, tokenizer = FAMILIES["phi"], tokenizer_of(FAMILIES["phi"])
    tokenizer.chat_template = str(tokenizer.chat_template).replace("'system', ", "")
    talk = [{"role": "system", "content": "It is 3+4="}, *TALK]
    assert fault(encoder_of(family, tokenizer, talk)) == LEFT_OUT.replace("tool", "system")


def test_a_part_of_a_content_may_not_vanish() -> None:
    family, tokenizer = FAMILIES["chatml"], tokenizer_of(FAMILIES["chatml"])
    tokenizer.chat_template = str(tokenizer.chat_template).replace("m.content }}", "m.content.split('#')[0] }}")
    talk = [{"role": "user", "content": "3+4= # and why?"}, *TALK[1:]]
    assert fault(encoder_of(family, tokenizer, talk)) == LEFT_OUT.replace("tool", "user")


def test_a_refusal_is_told_as_before() -> None:
    family, tokenizer = FAMILIES["gemma"], tokenizer_of(FAMILIES["gemma"])
    talk = [{"role": "system", "content": "x"}, *TALK]
    assert fault(encoder_of(family, tokenizer, talk)) == "is refused by the tokenizer's chat template: no system role"


def test_tools_that_no_template_writes_are_counted() -> None:
    for name, notes in (("phi", [(0, NO_TOOLS)]), ("chatml", [])):
        encoder = encoder_of(FAMILIES[name], tokenizer_of(FAMILIES[name]), TALK, TOOLS)
        learned(encoder, tokenizer_of(FAMILIES[name]))
        assert encoder.notes == notes


def test_an_episode_tells_what_the_template_leaves_out() -> None:
    encoder = TurnEncoder(tokenizer_of(FAMILIES["phi"]), chat_template="Auto")
    with pytest.raises(DataError, match="role 'tool' that the tokenizer's chat template leaves out"):
        encoder.observation([TOLD])


@pytest.mark.parametrize("name", ["chatml", "llama", "r1"])
def test_an_episode_goes_on_with_what_a_tool_says(name: str) -> None:
    encoder = TurnEncoder(tokenizer_of(FAMILIES[name]), chat_template="Auto")
    assert "result" in encoder.answer([*encoder.observation([{**TOLD, "name": "add", "content": "result"}]), 0])


LAST_QUESTION = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{{ (messages[0].content + ' ' if loop.last and messages[0].role == 'system' else '') + m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
"""Template that writes a system prompt with the last question only, so it is in no conversation that has ended."""


def test_a_system_prompt_of_the_last_question_is_there() -> None:
    family, tokenizer = FAMILIES["mistral"], tokenizer_of(FAMILIES["mistral"])
    tokenizer.chat_template = LAST_QUESTION
    encoder = encoder_of(family, tokenizer, [{"role": "system", "content": "Be kind."}, *TALK])
    assert learned(encoder, tokenizer) == ["7<|endoftext|>", "2<|endoftext|>"]
    assert "Be kind." in str(tokenizer.decode(encoder.prompts()[0]))


def test_a_call_is_found_where_results_need_one() -> None:
    """Without the call the template leaves out the result."""
    family, tokenizer = FAMILIES["chatml"], tokenizer_of(FAMILIES["chatml"])
    needs_call = "m.role == 'tool' and messages[loop.index0 - 1].tool_calls is not defined"
    changed = "{% if " + needs_call + " %}{% elif m.role == 'tool' %}"
    tokenizer.chat_template = str(tokenizer.chat_template).replace("{% if m.role == 'tool' %}", changed)
    assert learned(encoder_of(family, tokenizer, TOOL_TALK), tokenizer)[0] == CALL
    assert fault(encoder_of(family, tokenizer, asked(TOLD))) == LEFT_OUT


def test_a_conversation_with_a_call_is_whole() -> None:
    for name in ("chatml", "mistral"):
        assert fault(encoder_of(FAMILIES[name], tokenizer_of(FAMILIES[name]), TOOL_TALK)) == ""


@pytest.mark.parametrize("content", ["", "I add."])
def test_a_call_may_not_vanish_though_tools_name_it(content: str) -> None:
    family, tokenizer = FAMILIES["chatml"], tokenizer_of(FAMILIES["chatml"])
    tokenizer.chat_template = str(tokenizer.chat_template).replace(CALLS, "")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    talk = [TALK[0], {**TOOL_TALK[1], "content": content}]
    assert fault(encoder_of(family, tokenizer, talk, tools)) == LEFT_OUT.replace("tool", "assistant", 1)


def test_each_of_parallel_calls_has_to_be_there() -> None:
    family, tokenizer = FAMILIES["llama"], tokenizer_of(FAMILIES["llama"])
    talk = [TALK[0], {**TOOL_TALK[1], "tool_calls": [ADD, ADD]}]
    assert fault(encoder_of(family, tokenizer, talk)) == LEFT_OUT.replace("tool", "assistant", 1)
    family, tokenizer = FAMILIES["chatml"], tokenizer_of(FAMILIES["chatml"])
    (call,) = learned(encoder_of(family, tokenizer, talk), tokenizer)
    assert call == CALL.replace("<|im_end|>", "\n") + CALL


def test_what_a_tool_says_inside_an_answer_is_not_learned() -> None:
    """Some templates write a call, what the tool says and then the text beside the call as one turn."""
    family, tokenizer = FAMILIES["chatml"], tokenizer_of(FAMILIES["chatml"])
    result = "{% if m.tool_calls and not loop.last %}<|{{ messages[loop.index0 + 1].content }}|>{% endif %}"
    merged = str(tokenizer.chat_template).replace(CALLS, CALLS + result)
    unseen = "{% if m.role == 'tool' %}{% elif m.role == 'tool' %}"
    tokenizer.chat_template = merged.replace("{% if m.role == 'tool' %}", unseen)
    encoder = encoder_of(family, tokenizer, TOOL_TALK)
    assert learned(encoder, tokenizer) == ["It is 7.<|im_end|>"]
    assert encoder.notes == [(0, UNLEARNED)]


@pytest.mark.parametrize("kind", ["text", "input_text"])
def test_parts_of_text_mean_the_same_as_the_text(kind: str) -> None:
    """Arrow writes each key of any part in all of them, as nulls."""
    family, tokenizer = FAMILIES["chatml"], tokenizer_of(FAMILIES["chatml"])
    parts = [{"type": kind, "text": each, "image": None} for each in ("3+", "4=")]
    found = [encoder_of(family, tokenizer, [{"role": "user", "content": each}, *TALK[1:]]) for each in ("3+4=", parts)]
    assert found[0].conversations() == found[1].conversations() != ([], [])


@pytest.mark.parametrize(
    ("part", "kind"),
    [({"type": "image_url", "image_url": {"url": "x"}}, "image_url"), ({"image": "x"}, None), ("3", "str")],
)
def test_a_part_that_is_no_text_is_named(part: object, kind: str | None) -> None:
    talk = [{"role": "user", "content": [{"type": "text", "text": "3+4="}, part]}, *TALK[1:]]
    told = f"has a message of role 'user' with a part of type {kind!r}; only texts are read"
    assert fault(encoder_of(FAMILIES["chatml"], tokenizer_of(FAMILIES["chatml"]), talk)) == told


def test_a_template_that_reads_only_parts_gets_them() -> None:
    """Templates of some vision models leave a text out, or take its letters for parts."""
    family, tokenizer = FAMILIES["phi"], tokenizer_of(FAMILIES["phi"])
    in_parts = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    tokenizer.chat_template = str(tokenizer.chat_template).replace("{{ m.content }}", in_parts)
    encoder = encoder_of(family, tokenizer, TALK)
    assert ends_of(family, tokenizer).texts[0] == "<|end|>"
    assert learned(encoder, tokenizer) == ["7<|end|>", "2<|end|>"]


def test_parts_are_given_only_where_the_template_reads_them() -> None:
    """A template that reads parts of the user and texts of the assistant; a list of parts would be learned as text."""
    family, tokenizer = FAMILIES["phi"], tokenizer_of(FAMILIES["phi"])
    of_user = (
        "{% if m.role == 'user' %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    )
    of_user += "{% endfor %}{% else %}{{ m.content }}{% endif %}"
    tokenizer.chat_template = str(tokenizer.chat_template).replace("{{ m.content }}", of_user)
    assert learned(encoder_of(family, tokenizer, TALK), tokenizer) == ["7<|end|>", "2<|end|>"]


def test_few_shapes_of_conversations_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forgotten shape is tried again: a message that the template leaves out is named for each conversation."""
    monkeypatch.setattr("rlhf_trainer.chat.MAX_SHAPES", 2)
    template = Template(tokenizer_of(FAMILIES["phi"]))
    for _ in range(2):
        for length in range(1, 6):
            with pytest.raises(BadValueError, match="role 'tool'"):
                template.render([TALK[0]] * length + [TOLD], (), is_prompt=True)
    assert len(template._written) <= 2
