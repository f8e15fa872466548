"""Verifiers: rewards that compare a response with an answer, or check the response's form."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, JsonValue

from rlhf_api.contract import Count, Identifier, Listed, Spec, Text, Whole, null_is_unset


def _regex(pattern: str, *, groups: int = 0) -> str:
    try:
        found = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from error
    if found < groups:
        raise ValueError("has no group, expected one in parentheses around what is compared")
    return pattern


Pattern = Annotated[Text, AfterValidator(_regex)]
Extract = Annotated[Text, AfterValidator(partial(_regex, groups=1))] | None
AnswerKey = Annotated[Text, Field(description="Column of the right answer, or of a list of right answers.")]


class Verifier(Spec):
    """Base of verifiers: a finished response scores from 0 to 1, a response that was cut off scores 0."""

    name: str

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the data that the verifier reads."""
        return ()


class Comparing(Verifier):
    """A verifier that compares the response with an answer in the data."""

    hints: ClassVar = {"extract": "write answerExtract for the column, and responseExtract for responses"}

    answer_key: AnswerKey = "answer"
    answer_extract: Extract = None
    """Regular expression whose group's last match in the column is the right answer; a row without a match is bad."""
    response_extract: Extract = None
    """Regular expression whose group's last match after the thoughts is compared; a response without a match is wrong.
    Unset: the text in the last <answer></answer>, or all text after the thoughts.
    """

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.answer_key,)


class Math(Comparing):
    name: Literal["Math"]
    """1 for a number or expression equal to the answer (LaTeX, boxed, a fraction or the last number)."""


class ExactMatch(Comparing):
    name: Literal["ExactMatch"] = Field(description="1 for the same text as the answer, apart from spaces around it.")


class FuzzyMatch(Comparing):
    name: Literal["FuzzyMatch"]
    """F1 score of response's and answer's words, without case, punctuation and articles (SQuAD, arXiv 1606.05250)."""


class JSONSchema(Verifier):
    name: Literal["JSONSchema"]
    """1 for a response whose JSON, or last JSON block, obeys jsonSchema."""
    json_schema: dict[Annotated[str, Field(pattern=r"^[!-~]+$", max_length=128)], JsonValue] = Field(max_length=64)
    """JSON Schema (draft 2020-12) that the JSON of the response must obey."""


class Regex(Verifier):
    name: Literal["Regex"] = Field(description="1 for a response in which `pattern` is found.")
    pattern: Pattern = Field(description="Regular expression in the syntax of Python's re.")


class Format(Verifier):
    name: Literal["Format"] = Field(description="1 for one <tag>text</tag> for each tag, in order, and nothing else.")
    tags: Listed[Identifier] = Field(min_length=1, max_length=16, description="Tag names, such as [think, answer].")


class Length(Verifier):
    name: Literal["Length"] = Field(description="1 for a response of minimum to maximum characters.")
    minimum: Whole = Field(0, description="Fewest characters of the response, without spaces around it.")
    maximum: Count = Field(description="Most characters of the response, without spaces around it.")


class Code(Verifier):
    name: Literal["Code"]
    """1 for Python code, or a last block of it, that passes all tests in a sandboxed process."""
    tests_key: Text = "tests"
    """Column of the tests: assertions, pytest functions, unittest classes, HumanEval's check(candidate), inputs and
    outputs (APPS, LiveCodeBench), or a list of these, as values or JSON text.
    """
    solution_key: Text | None = None
    """Column of a right program, or of several. A row is bad if its tests fail all of the first 3."""
    seconds: float = Field(5.0, gt=0, description="Most CPU time of a response's code and tests; 5 times it in all.")
    memory_mebibytes: Count = Field(1024, description="Most memory that the code and its tests may take.")

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.tests_key,)


ANSWERS = "text, a number or a list of these"
"""Words for the types that a column of right answers may hold."""


def are_answers(value: object, *others: type) -> bool:
    """Whether a value is an answer, or a list of answers, and not empty; others: further types of answers."""
    values, kinds = value if isinstance(value, list) else [value], (str, int, float, *others)
    return all(isinstance(each, kinds) and each == each and each != "" for each in values or [""])


VERIFIERS: Mapping[str, type[Verifier]] = {
    each.__name__: each for each in (Math, ExactMatch, FuzzyMatch, JSONSchema, Regex, Format, Length, Code)
}


class RewardVerifier(Spec):
    """A reward computed by one of the verifiers that come with the trainer, in a process of its own."""

    form: ClassVar = "a verifier"

    verifier: Annotated[
        Math | ExactMatch | FuzzyMatch | JSONSchema | Regex | Format | Length | Code,
        Discriminator("name"),
        null_is_unset(*VERIFIERS.values()),
    ]
    """Name of the verifier, and its options."""
    timeout_seconds: float = Field(300.0, gt=0, description="Longest time of one call, on the responses of one rank.")
