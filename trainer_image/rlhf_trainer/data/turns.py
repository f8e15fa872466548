"""What an environment says, as token ids that go on after the ids of an answer: those are never encoded again."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlhf_trainer.data.tokens import ChatTemplate, Ids, Message
from rlhf_trainer.errors import DataError

QUESTION, ANSWER = "question", "answer-of-the-model"
"""Messages before what is encoded; nothing else of a template writes the second one."""


class TurnEncoder:
    """Messages go through the tokenizer's chat template, a text as one of the user.

    Without a template, or where `chat_template` is "Never", there are only texts, which are encoded as they stand.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat_template: ChatTemplate) -> None:
        self._tokenizer, self._has_template = tokenizer, bool(tokenizer.chat_template)
        self._texts_are_messages = self._has_template and chat_template == "Auto"

    def prompt(self, said: str | list[Message]) -> Ids:
        """What an episode begins with, up to where the model answers. DataError for what the template refuses."""
        messages = self._as_messages(said)
        return self._encoded(self._rendered(messages) if isinstance(messages, list) else messages)

    def observation(self, said: str | list[Message]) -> Ids:
        """What comes after the end-of-text token of an answer, up to where the model answers again.

        The template is given a made-up answer before it; what it writes after that answer is what is encoded.
        """
        messages = self._as_messages(said)
        if isinstance(messages, str):
            return self._encoded(messages)
        before = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
        rest = self._rendered([*before, *messages]).rpartition(ANSWER)[2]
        ending, end, after = rest.partition(str(self._tokenizer.eos_token))
        return self._encoded(after if end and not ending.strip() else rest)

    def answer(self, tokens: Ids) -> str:
        """What the model wrote, without the end-of-text token; special tokens of calls are part of it."""
        written = tokens[:-1] if tokens[-1] == self._tokenizer.eos_token_id else tokens
        return str(self._tokenizer.decode(written, skip_special_tokens=False))

    def _as_messages(self, said: str | list[Message]) -> str | list[Message]:
        if isinstance(said, str):
            return [{"role": "user", "content": said}] if self._texts_are_messages else said
        if not self._has_template:
            raise DataError("gave messages, but the tokenizer has no chat template; expected a text")
        return said

    def _rendered(self, messages: list[Message]) -> str:
        try:
            text: Any = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(f"gave messages that the chat template refuses: {error}") from error
        return str(text)

    def _encoded(self, text: str) -> Ids:
        whole = text.encode(errors="backslashreplace").decode()  # JSON may hold half a character, which has no ids
        ids: Ids = self._tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]
        return ids
