"""Each chat template of TRL's wheel: what is learned of five conversations, or the sentence that refuses them.

`make` fetches the templates (TRL); none of them is in the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlhf_trainer.data.tokens import UNLEARNED
from tests.each import each_case
from tests.foreign.turns.encoding import encoder_of, ends_of, fault, learned, text_of
from tests.foreign.turns.families import TALK, TOOL_TALK, Family, tokenizer_of

TEMPLATES = Path(__file__).parents[3] / ".venv-trl" / "trl" / "chat_templates"
SPECIAL = re.compile(
    r"<[|\uff5c][^|\uff5c<>\s]+[|\uff5c]>|<\|[a-z_]+>|<[a-z_]+\|>|</s>|<(?:start|end)_of_(?:turn|utterance)>|\[/?INST\]"
)
"""Pattern of the special tokens in a template; the real tokenizers have them."""
END = "<|endoftext|>"
EOS = {"gptoss": "<|return|>", "gptoss_training": "<|return|>"}
"""End-of-text token of a family; `END` for all others, as for a base model."""
SYSTEM = {"role": "system", "content": "Be kind."}
ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": ADD}]
TALKS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "turns": (TALK, None),
    "system": ([SYSTEM, *TALK], None),
    "tools": (TOOL_TALK, TOOLS),
    "thinking": ([*TALK[:3], {"role": "assistant", "content": "<think>\none and one\n</think>\n\n2"}], None),
    "reasoning": ([*TALK[:3], {"role": "assistant", "content": "2", "reasoning_content": "one and one"}], None),
}
"""Kind of a conversation -> (its messages, its tools)."""
TABLE = """
cohere                           <|END_OF_TURN_TOKEN|>    all      all      refused  all      left_out
cohere2                          <|END_OF_TURN_TOKEN|>    all      all      left_out all      left_out
cohere2_training                 <|END_OF_TURN_TOKEN|>    all      all      left_out all      left_out
cohere_training                  <|END_OF_TURN_TOKEN|>    all      all      refused  all      left_out
deepseek_r1_distill              <\uff5cend\u2581of\u2581sentence\uff5c> all      all      last     all      left_out
deepseek_r1_distill_training     <\uff5cend\u2581of\u2581sentence\uff5c> all      all      last     all      left_out
deepseekv3                       <\uff5cend\u2581of\u2581sentence\uff5c> all      all      all      all      left_out
deepseekv3_training              <\uff5cend\u2581of\u2581sentence\uff5c> all      all      all      all      left_out
diffusion_gemma                  <turn|>                  all      all      last     all      all
diffusion_gemma_training         <turn|>                  all      all      last     all      all
gemma                            <end_of_turn>            all      refused  refused  all      left_out
gemma3                           <end_of_turn>            all      all      refused  all      left_out
gemma3_training                  <end_of_turn>            all      all      refused  all      left_out
gemma4                           <turn|>                  all      all      last     all      left_out
gemma4_v2                        <turn|>                  all      all      all      all      left_out
gemma4_v3                        <turn|>                  all      all      last     all      left_out
gemma4_v4                        <turn|>                  all      all      last     all      left_out
gemma4_v5                        <turn|>                  all      all      last     all      all
gemma_training                   <end_of_turn>            all      refused  refused  all      left_out
glm4moe                          <|endoftext|>            last     last     last     last     last
glm4moe_training                 <|user|>                 all      all      last     all      all
gptoss                           <|return|>               last     last     last     last     left_out
gptoss_training                  <|return|>               last     last     last     last     left_out
idefics3                         <end_of_utterance>       all      all      refused  all      left_out
idefics3_training                <end_of_utterance>       all      all      refused  all      left_out
lfm2                             <|im_end|>               all      all      left_out all      left_out
lfm2_2_5                         <|im_end|>               all      all      all      all      left_out
lfm2_2_5_v2                      <|im_end|>               all      all      all      all      all
lfm2_2_5_vl                      <|im_end|>               all      all      all      all      all
lfm2_training                    <|im_end|>               all      all      left_out all      left_out
lfm2_v2                          <|im_end|>               all      all      all      all      left_out
lfm2_v2_training                 <|im_end|>               all      all      all      all      left_out
llama3                           <|eot_id|>               all      all      left_out all      left_out
llama3_1                         <|eot_id|>               all      all      all      all      left_out
llama3_2                         <|eot_id|>               all      all      all      all      left_out
llama3_training                  <|eot_id|>               all      all      left_out all      left_out
llava_next                       </s>                     all      all      refused  all      left_out
llava_next_training              </s>                     all      all      refused  all      left_out
muse_glimmer                     <|eot|>                  all      all      all      all      all
muse_glimmer_training            <|eot|>                  all      all      all      all      all
nemotron_3_5_lightning           <|im_end|>               all      all      all      all      all
nemotron_3_5_lightning_training  <|im_end|>               all      all      all      all      all
nemotron_3_nano                  <|im_end|>               all      all      all      all      all
nemotron_3_nano_training         <|im_end|>               all      all      all      all      all
nemotron_3_super                 <|im_end|>               all      all      all      all      all
nemotron_3_super_training        <|im_end|>               all      all      all      all      all
nemotron_3_ultra                 <|im_end|>               all      all      all      all      all
nemotron_3_ultra_training        <|im_end|>               all      all      all      all      all
phi3                             <|end|>                  all      all      left_out all      left_out
phi3_5                           <|end|>                  all      all      left_out all      left_out
phi3_5_training                  <|end|>                  all      all      left_out all      left_out
phi3_training                    <|end|>                  all      all      left_out all      left_out
qwen2_5                          <|im_end|>               all      all      all      all      left_out
qwen2_5_training                 <|im_end|>               all      all      all      all      left_out
qwen2_5_vl                       <|im_end|>               all      all      left_out all      left_out
qwen2_5_vl_training              <|im_end|>               all      all      left_out all      left_out
qwen3                            <|im_end|>               all      all      all      all      all
qwen3_5_nothink                  <|im_end|>               all      all      all      all      left_out
qwen3_5_nothink_training         <|im_end|>               all      all      all      all      left_out
qwen3_5_think                    <|im_end|>               all      all      all      all      all
qwen3_5_think_training           <|im_end|>               all      all      all      all      all
qwen3_6                          <|im_end|>               all      all      all      all      all
qwen3_6_training                 <|im_end|>               all      all      all      all      all
qwen3_8                          <|im_end|>               all      all      all      all      all
qwen3_8_training                 <|im_end|>               all      all      all      all      all
qwen3_instruct_2507              <|im_end|>               all      all      all      all      left_out
qwen3_instruct_2507_training     <|im_end|>               all      all      all      all      left_out
qwen3_training                   <|im_end|>               all      all      all      all      all
qwen3_vl                         <|im_end|>               all      all      all      all      left_out
qwen3_vl_training                <|im_end|>               all      all      all      all      left_out
smolvlm                          <end_of_utterance>       all      all      refused  all      left_out
smolvlm_training                 <end_of_utterance>       all      all      refused  all      left_out
"""
"""Template | the token that ends a turn | for each of TALKS: are all answers learned, or only the last one with the
others counted; or does the template refuse the conversation, or is it bad because the template leaves something out?
"""


class Expected(NamedTuple):
    end: str
    outcomes: dict[str, str]


def expected() -> dict[str, Expected]:
    rows = [line.split() for line in TABLE.strip().splitlines()]
    return {name: Expected(end, dict(zip(TALKS, found, strict=True))) for name, end, *found in rows}


EXPECTED = expected()


def family_of(name: str) -> Family:
    if not TEMPLATES.is_dir():
        pytest.fail("the templates of TRL are not here; fetch them: make .venv-trl/installed")
    template = (TEMPLATES / f"{name}.jinja").read_text()
    special = sorted({*SPECIAL.findall(template)} - {END})
    return Family(template=template, special=special, eos=EOS.get(name, END), ends=(), learned=())


def outcome(name: str, kind: str) -> str:
    """Outcome of a conversation; each learned text is a whole answer with its end, without text of other messages."""
    family, (talk, tools) = family_of(name), TALKS[kind]
    tokenizer = tokenizer_of(family)
    encoder = encoder_of(family, tokenizer, talk, tools)
    if sentence := fault(encoder):
        assert "\n" not in sentence
        left_out = r"has a (message of role '\w+'|last answer) that the tokenizer's chat template leaves out( in part)?"
        is_refused = sentence.startswith("is refused by the tokenizer's chat template: ")
        return "refused" if is_refused else "left_out" if re.fullmatch(left_out, sentence) else sentence
    encoder = encoder_of(family, tokenizer, talk, tools)
    texts, ends = learned(encoder, tokenizer), ends_of(family, tokenizer).texts
    answers = [each for each in talk if each["role"] == "assistant"][-len(texts) :]
    others = [each["content"] for each in talk if each["role"] in ("user", "system")]
    for text, answer in zip(texts, answers, strict=True):
        assert text.endswith(tuple(ends))
        assert not any(each in text for each in others)
        thought, _, content = answer["content"].rpartition("</think>")
        named = [answer.get("reasoning_content", ""), "one and one" * bool(thought), "add" * ("tool_calls" in answer)]
        assert all(each in text for each in (content.strip(), *named))
    missing = sum(each["role"] == "assistant" for each in talk) - len(texts)
    assert encoder.notes == [(0, UNLEARNED)] * missing
    return "last" if missing else "all"


@each_case("name", EXPECTED)
def test_each_conversation_is_learned_or_refused(name: str) -> None:
    assert {kind: outcome(name, kind) for kind in TALKS} == EXPECTED[name].outcomes


@each_case("name", EXPECTED)
def test_a_prompt_ends_where_an_answer_begins(name: str) -> None:
    """The end of a turn is that of the table; a prompt is what the tokenizer itself makes of the messages."""
    family = family_of(name)
    tokenizer = tokenizer_of(family)
    assert ends_of(family, tokenizer).texts[0] == EXPECTED[name].end
    (prompt,) = encoder_of(family, tokenizer, TALK).prompts()
    forms = [[{**each, "content": form(each["content"])} for each in TALK[:3]] for form in (str, in_parts)]
    options = {"tokenize": False, "add_generation_prompt": True}
    rendered = [tokenizer.apply_chat_template(chat, **options) for chat in (forms[1:] if of_parts(name) else forms[:1])]
    assert [text_of(tokenizer, prompt)] == rendered


def of_parts(name: str) -> bool:
    """Whether a template writes only contents that are lists of parts."""
    return name.startswith(("idefics3", "llava_next", "smolvlm"))


def in_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def test_the_table_has_each_template() -> None:
    family_of("qwen3")
    assert {each.stem for each in TEMPLATES.glob("*.jinja")} == EXPECTED.keys()
