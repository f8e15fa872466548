"""Encoding of an environment's messages as token ids to append to an answer's ids, which are not encoded anew."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlhf_trainer.data.tokens import ChatMessage, ChatTemplate, Ids
from rlhf_trainer.errors import DataError

QUESTION, ANSWER = "question", "answer-of-the-model"
"""Made-up question and answer before an observation; no chat template writes the answer's text by itself."""


class TurnEncoder:
    """Encoder of an environment's messages by the tokenizer's chat template; a text is a message of the user.

    Without a template, or if `chat_template` is "Never", texts are encoded as they stand.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat_template: ChatTemplate) -> None:
        self._tokenizer, self._has_template = tokenizer, bool(tokenizer.chat_template)
        self._texts_are_messages = self._has_template and chat_template == "Auto"

    def prompt(self, given: str | list[ChatMessage]) -> Ids:
        """Return the ids of an episode's first messages, up to the answer. DataError if the template refuses them."""
        messages = self._as_messages(given)
        return self._encoded(self._rendered(messages) if isinstance(messages, list) else messages)

    def observation(self, given: str | list[ChatMessage]) -> Ids:
        """Return the token ids of an observation, from the end of an answer up to the model's next answer.

        The template gets a made-up answer before the observation; the text after that answer is encoded.
        """
        messages = self._as_messages(given)
        if isinstance(messages, str):
            return self._encoded(messages)
        before = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
        rest = self._rendered([*before, *messages]).rpartition(ANSWER)[2]
        ending, end, after = rest.partition(str(self._tokenizer.eos_token))
        return self._encoded(after if end and not ending.strip() else rest)

    def answer(self, tokens: Ids) -> str:
        """Return the text of an answer without its end-of-text token; special tokens of tool calls are kept."""
        written = tokens[:-1] if tokens[-1] == self._tokenizer.eos_token_id else tokens
        return str(self._tokenizer.decode(written, skip_special_tokens=False))

    def _as_messages(self, given: str | list[ChatMessage]) -> str | list[ChatMessage]:
        if isinstance(given, str):
            return [{"role": "user", "content": given}] if self._texts_are_messages else given
        if not self._has_template:
            raise DataError("gave messages, but the tokenizer has no chat template; expected a text")
        return given

    def _rendered(self, messages: list[ChatMessage]) -> str:
        try:
            text: Any = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(f"gave messages that the chat template refuses: {error}") from error
        return str(text)

    def _encoded(self, text: str) -> Ids:
        whole = text.encode(errors="backslashreplace").decode()  # JSON may hold a lone surrogate, which has no ids
        ids: Ids = self._tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]
        return ids
