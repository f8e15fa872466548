"""Judges of responses and teachers of an actor: language models behind an OpenAI-compatible endpoint."""

import re
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from rlhf_api.contract import Count, Identifier, Spec, Text
from rlhf_api.expressions import VALUE, Check
from rlhf_api.spec.functions import MAX_DEPTH, JsonFields, ServiceUrl

RESPONSE, RESPONSE_A, RESPONSE_B = "response", "response_a", "response_b"
GIVEN = ("prompt", RESPONSE, RESPONSE_A, RESPONSE_B)
"""Placeholders of a judge's prompt template that the trainer fills; any other one names a column of the data."""
PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
COMPARES = r"\{response_a\}"
"""Pattern that is found only in a prompt template that compares two responses."""
OWN_FIELDS = ("model", "messages", "stream", "n")
"""Fields of a request to a judge that the trainer writes, so that no argument can set them."""


def _asks_one_thing(template: str) -> str:
    named = set(PLACEHOLDER.findall(template)) & {RESPONSE, RESPONSE_A, RESPONSE_B}
    if named not in ({RESPONSE}, {RESPONSE_A, RESPONSE_B}):
        raise ValueError("expected {response}, to be given a number, or {response_a} and {response_b}, to be compared")
    return template


class Judge(Spec):
    """A model behind POST <url>/chat/completions that gives a response a number, or says which of two is better.

    The answer ends with [[number]], or with [[A]], [[B]] or [[C]] (neither), or is the number or letter alone.
    """

    url: ServiceUrl = Field(description="URL of the API, such as https://host/v1; /chat/completions is added.")
    model: Text = Field(description="Name by which the API knows the model.")
    prompt: Annotated[str, Field(min_length=1, max_length=16384), AfterValidator(_asks_one_thing)]
    """Question to the judge: {prompt}, {response} and columns of the data by name are put in; with {response_a} and
    {response_b} two responses are compared, once in each order.
    """
    minimum: float = Field(1.0, description="Lowest number that the judge may give; it becomes the score 0.")
    maximum: float = Field(10.0, description="Highest number that the judge may give; it becomes the score 1.")
    reference_key: Text | None = None
    """Column of a response with which each response is compared; unset: with the other responses to its prompt. A
    response's score is the share of comparisons that it wins; a tie is half.
    """
    arguments: JsonFields[Annotated[Identifier, Check(~VALUE.one_of(OWN_FIELDS), "is written by the trainer")]] = Field(
        {"temperature": 0, "max_tokens": 1024},
        description=f"Further fields of each request; at most {MAX_DEPTH} levels deep.",
    )
    max_unread_share: float = Field(0.5, ge=0, le=1)
    """Largest share of a call's questions without a verdict; above it the run ends."""
    timeout_seconds: float = Field(120.0, gt=0, description="Longest time of one attempt for one question.")
    attempts: Count = Field(8, description="Largest number of attempts for one question, with growing pauses between.")
    concurrency: Count = 16
    """Largest number of questions at once, over all ranks; one a rank at least."""
    token_variable: Identifier | None = Field(None, description="Environment variable that holds the bearer token.")

    @field_validator("maximum")
    @classmethod
    def _is_more(cls, maximum: float, info: ValidationInfo) -> float:
        if maximum <= info.data.get("minimum", -float("inf")):
            raise ValueError("is not more than minimum")
        return maximum

    @field_validator("reference_key")
    @classmethod
    def _is_compared(cls, key: str | None, info: ValidationInfo) -> str | None:
        if key is not None and RESPONSE in PLACEHOLDER.findall(info.data.get("prompt", "")):
            raise ValueError("is for a prompt with {response_a} and {response_b}")
        return key

    @property
    def compares(self) -> bool:
        """Whether the judge compares two responses."""
        return re.search(COMPARES, self.prompt) is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the data that the judge reads."""
        named = [name for name in PLACEHOLDER.findall(self.prompt) if name not in GIVEN]
        return tuple(dict.fromkeys([*named, *([self.reference_key] if self.reference_key else [])]))

    def fill_prompt(self, **texts: Any) -> str:
        """Return the prompt with the given texts in place of its placeholders."""
        return PLACEHOLDER.sub(lambda match: str(texts[match[1]]), self.prompt)


class RewardJudge(Spec):
    """A reward that a judge gives."""

    form: ClassVar = "a judge"

    judge: Judge = Field(description="Judge of the responses: its API and the question to it.")


class TeacherEndpoint(Spec):
    """A teacher behind POST <url>/completions of vLLM's server, with token ids of the actor's tokenizer."""

    name: Text
    """Name of the teacher; the value of algorithm.teacherKey in the rows that it teaches."""
    url: ServiceUrl = Field(description="URL of the API, such as http://host:8000/v1; /completions is added.")
    model: Text = Field(description="Name by which the API knows the model.")
    timeout_seconds: float = Field(120.0, gt=0, description="Longest time of one attempt for one response.")
    attempts: Count = Field(8, description="Largest number of attempts for one response, with growing pauses between.")
    concurrency: Count = 64
    """Largest number of responses at once, over all ranks; one a rank at least."""
    token_variable: Identifier | None = Field(None, description="Environment variable that holds the bearer token.")
