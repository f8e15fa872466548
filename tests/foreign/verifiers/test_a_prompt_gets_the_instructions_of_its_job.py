"""`data.systemPrompt`, `data.promptTemplate`, `data.chatTemplate` and its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rlhf_api.spec.data import Data, DataSource
from rlhf_trainer.chat import BadValueError
from rlhf_trainer.data.instructions import instructed, prompt_template, set_chat_template
from rlhf_trainer.data.loaders import PromptLoader
from rlhf_trainer.errors import ConfigError
from tests.each import each_case
from tests.trainer.unit.data.conftest import chat, plain, spec_of  # noqa: F401 fixtures

USER, SYSTEM = {"role": "user", "content": "2 + 2?"}, {"role": "system", "content": "Be brief."}
REPLY = {"role": "assistant", "content": "4"}


def data_with(**fields: Any) -> Data:
    return Data.model_validate({"train": {"uri": "hf://a/b"}, **fields})


CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "a prefix": ({"promptTemplate": "Q: {{ prompt }}"}, [USER], [{**USER, "content": "Q: 2 + 2?"}]),
    "a line break": ({"promptTemplate": "{{ prompt }}\nThink.\n"}, [USER], [{**USER, "content": "2 + 2?\nThink.\n"}]),
    "a column": ({"promptTemplate": "{{ prompt }} ({{ level }})"}, "2 + 2?", "2 + 2? (3)"),
    "the last message": (
        {"promptTemplate": "{{ prompt }}!"},
        [SYSTEM, USER, REPLY, USER],
        [SYSTEM, USER, REPLY, {**USER, "content": "2 + 2?!"}],
    ),
    "a system's message": ({"systemPrompt": "Be brief."}, [USER], [SYSTEM, USER]),
    "a system's message of the row's own": ({"systemPrompt": "Be long."}, [SYSTEM, USER], [SYSTEM, USER]),
    "both": (
        {"systemPrompt": "Be brief.", "promptTemplate": "{{ prompt }}!"},
        [USER],
        [SYSTEM, {**USER, "content": "2 + 2?!"}],
    ),
}


@each_case("case", CASES)
def test_a_prompt_gets_its_instructions(case: str) -> None:
    fields, prompt, expected = CASES[case]
    assert instructed(data_with(**fields), {"level": [1, 3]}, prompt, 1) == expected


def test_a_template_names_the_columns_that_it_reads() -> None:
    assert prompt_template("{{ b }} {{ prompt }} {% if a %}{{ a[0] }}{% endif %}")[1] == ["a", "b"]


def test_a_template_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^spec\.data\.promptTemplate: is no Jinja: "):
        prompt_template("{{ prompt")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"promptTemplate": "{{ prompt }}{{ level + 1 }}"}, "is refused by spec.data.promptTemplate: "),
        ({"systemPrompt": "Be brief."}, "goes through no chat template, which spec.data.systemPrompt needs"),
    ],
)
def test_a_prompt_that_cannot_have_instructions_is_bad(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(BadValueError) as caught:
        instructed(data_with(**fields), {"level": [None]}, "2 + 2?", 0)
    assert str(caught.value).startswith(told)


def test_a_loader_reads_the_columns_of_the_template(tmp_path: Path, chat: PreTrainedTokenizerFast) -> None:  # noqa: F811
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2?", "level": 3}\n{"prompt": "", "level": 3}\n')
    spec = spec_of(99, 9)
    fields = {"prompt_template": "{{ prompt }} ({{ level }})", "system_prompt": "Be brief."}
    spec = spec.model_copy(update={"data": spec.data.model_copy(update=fields)})
    made = PromptLoader(DataSource(uri=f"file://{tmp_path}/rows.jsonl"), chat, path="x", spec=spec)
    rows = made.ordered()
    text = chat.decode(rows["prompt_ids"][0][rows["prompt_mask"][0] > 0])
    assert "Be brief." in text
    assert "2 + 2? (3)" in text


def test_a_template_of_a_file_gets_its_arguments(tmp_path: Path, plain: PreTrainedTokenizerFast) -> None:  # noqa: F811
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}{% if not enable_thinking %}/no_think{% endif %}")
    data = data_with(chatTemplate=f"file://{tmp_path}/own.jinja", chatTemplateArguments={"enable_thinking": False})
    made = set_chat_template(plain, data, "one: spec.data")
    assert made.apply_chat_template([USER], tokenize=False, add_generation_prompt=True) == "2 + 2?/no_think"
    made.save_pretrained(tmp_path / "saved")
    assert "/no_think" in (tmp_path / "saved" / "chat_template.jinja").read_text()


def test_a_template_file_that_is_missing_is_named(tmp_path: Path, plain: PreTrainedTokenizerFast) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match=r"^one: spec\.data\.chatTemplate: file:///.*: there is no file"):
        set_chat_template(plain, data_with(chatTemplate=f"file://{tmp_path}/none.jinja"), "one: spec.data")


def test_an_argument_that_no_template_reads_is_told(plain: PreTrainedTokenizerFast) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match=r"^one: spec\.data\.chatTemplateArguments: .* reads no enable_thinkng$"):
        set_chat_template(plain, data_with(chatTemplateArguments={"enable_thinkng": False}), "one: spec.data")
