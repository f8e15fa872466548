"""Encoding of an environment's messages as token ids to append to an answer's ids, which are not encoded anew."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_trainer.chat import ANSWER, QUESTION, BadValueError, ChatMessage, EndTokens, Template, read_message
from rlhf_trainer.data.tokens import Ids
from rlhf_trainer.errors import DataError


class TurnEncoder:
    """Encoder of an environment's messages by the tokenizer's chat template; a text is a message of the user.

    Without a template, or if `chat_template` is "Never", texts are encoded as they stand.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, chat_template: str, ends: EndTokens | None = None
    ) -> None:
        self._tokenizer, self._has_template = tokenizer, bool(tokenizer.chat_template)
        self._template = Template(tokenizer, ends)
        self._texts_are_messages = self._has_template and chat_template != "Never"

    def prompt(self, given: str | list[ChatMessage], tools: Sequence[Any] = ()) -> Ids:
        """Return the ids of an episode's first messages, up to the answer. DataError if the template refuses them.

        tools: definitions for the template, which may write none.
        """
        messages = self._as_messages(given)
        if isinstance(messages, str):
            return self._template.opened(self._encoded(messages))
        return self._encoded(self._rendered(messages, tools))

    def observation(self, given: str | list[ChatMessage], *, ended: bool = True) -> Ids:
        """Return the token ids of an observation, from the end of an answer up to the model's next answer.

        The template gets a made-up answer before the observation; the text after that answer is encoded. ended: whether
        the model wrote the end of its answer, so that the observation begins after it.
        """
        messages = self._as_messages(given)
        if isinstance(messages, str):
            return self._encoded(messages)
        rest = self._rendered([QUESTION, ANSWER, *messages]).rpartition(ANSWER["content"])[2]
        end = self._template.ends.pattern.match(rest) if ended else None
        return self._encoded(rest[end.end() :] if end else rest)

    def answer(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer without its end token; special tokens of tool calls are kept."""
        written = tokens[:-1] if tokens[-1] in self._template.ends.ids else tokens
        return str(self._tokenizer.decode(list(written), skip_special_tokens=False))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [str(self._tokenizer.decode([token])) for token in tokens]

    def _as_messages(self, given: str | list[ChatMessage]) -> str | list[ChatMessage]:
        if isinstance(given, str):
            return [{"role": "user", "content": given}] if self._texts_are_messages else given
        if not self._has_template:
            raise DataError("gave messages, but the tokenizer has no chat template; expected a text")
        return given

    def _rendered(self, messages: list[ChatMessage], tools: Sequence[Any] = ()) -> str:
        try:
            return self._template.render([read_message(each) for each in messages], tools, is_prompt=True)
        except BadValueError as error:
            raise DataError(f"gave a conversation that {error}") from error

    def _encoded(self, text: str) -> Ids:
        whole = text.encode(errors="backslashreplace").decode()  # JSON may hold a lone surrogate, which has no ids
        ids: Ids = self._tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]
        return ids
