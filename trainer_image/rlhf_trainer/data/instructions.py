"""Instructions of a job (`data.promptTemplate`, `data.systemPrompt`), and its chat template."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from rlhf_api.spec.data import Data
from rlhf_trainer.chat import BadValueError, ChatMessage
from rlhf_trainer.data.uri import local_path
from rlhf_trainer.errors import ConfigError, DataError

JINJA = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


@lru_cache(maxsize=1)
def prompt_template(text: str | None) -> tuple[Template, list[str]]:
    """Return a job's prompt template, and the columns that it reads; ConfigError if it is no Jinja."""
    text = text or "{{ prompt }}"
    try:
        return JINJA.from_string(text), sorted(meta.find_undeclared_variables(JINJA.parse(text)) - {"prompt"})
    except TemplateError as error:
        raise ConfigError(f"spec.data.promptTemplate: is no Jinja: {error}") from error


def instructed(
    data: Data, table: Mapping[str, Sequence[Any]], chat: list[ChatMessage] | str, row: int
) -> list[ChatMessage] | str:
    """Return the prompt of a row of `table` with the job's instructions; BadValueError if it cannot have them."""
    template, columns = prompt_template(data.prompt_template)
    text = chat if isinstance(chat, str) else chat[-1]["content"]
    try:
        text = template.render({**{name: table[name][row] for name in columns}, "prompt": text})
    except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
        raise BadValueError(f"is refused by spec.data.promptTemplate: {error}") from error
    if isinstance(chat, str):
        if data.system_prompt:
            raise BadValueError("goes through no chat template, which spec.data.systemPrompt needs")
        return text
    has_own = data.system_prompt is None or chat[0]["role"] == "system"
    system = [] if has_own else [{"role": "system", "content": data.system_prompt}]
    return [*system, *chat[:-1], {**chat[-1], "content": text}]


def set_chat_template(tokenizer: PreTrainedTokenizerBase, data: Data, path: str) -> PreTrainedTokenizerBase:
    """Set a tokenizer's chat template and arguments by `data`, and return it. path: job and field, for errors."""
    if "://" in data.chat_template:
        try:
            tokenizer.chat_template = Path(local_path(data.chat_template)).read_text(encoding="utf-8")
        except (DataError, OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}.chatTemplate: {error}") from error
    with suppress(TemplateError):  # some templates have tags that only transformers knows
        known = meta.find_undeclared_variables(JINJA.parse(tokenizer.chat_template or ""))
        if unknown := sorted(data.chat_template_arguments.keys() - known):
            raise ConfigError(f"{path}.chatTemplateArguments: the chat template reads no {unknown[0]}")
    if data.chat_template_arguments:
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **data.chat_template_arguments)
    return tokenizer
