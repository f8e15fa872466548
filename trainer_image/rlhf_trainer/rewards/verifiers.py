"""The verifiers of `reward: {verifier: ...}` as one reward function; `rlhf_api.spec.verifiers` has their options."""

from __future__ import annotations

import builtins
import json
import re
import string
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any, Final

from rlhf_api.spec.verifiers import (
    ANSWERS,
    VERIFIERS,
    Code,
    Comparing,
    ExactMatch,
    Format,
    FuzzyMatch,
    JSONSchema,
    Length,
    Math,
    Regex,
    Verifier,
    are_answers,
)
from rlhf_trainer.rewards.supervision import MEBIBYTE, ChildLimits, judge_in_children, require_sandbox

OPTIONS: Final = "verifier()"
USUAL_LIMITS = ChildLimits(seconds=5.0, memory=1024 * MEBIBYTE)
"""Limits of one judgement by any verifier but Code, against regular expressions and formulas that never end."""
JUDGING_SHARE = 0.8
"""Share of a call's time limit after which the verifier judges no further response."""
BLOCK = re.compile(r"```[^\S\n]*\w*[^\S\n]*\n(.*?)```", re.DOTALL)
ARTICLES = re.compile(r"\b(a|an|the)\b")
VerifierScore = float | None | dict[str, float | None]
Judge = Callable[[str, Sequence[str]], float]
"""Function (response, right answers to compare it with) -> score of the response."""


def score(
    prompts: list[str],  # noqa: ARG001 so that a column may have this name
    responses: list[str],
    finished: list[bool],
    /,
    **given: Any,
) -> list[VerifierScore]:
    """Return a score from 0 to 1 for each response; None for those that are not judged within the time limit.

    given: columns by name, and under OPTIONS, no column's name, (verifier as JSON types, time limit in seconds).
    """
    verifier, seconds = given.pop(OPTIONS)
    until = time.monotonic() + JUDGING_SHARE * seconds
    chosen = VERIFIERS[verifier["name"]].model_validate(verifier)
    (column,) = chosen.columns or (None,)
    expected = [_texts(value, column) for value in given[column]] if column else [[]] * len(responses)
    places = [place for place, is_finished in enumerate(finished) if is_finished]
    items = [(responses[place], expected[place]) for place in places]
    limits = USUAL_LIMITS
    if isinstance(chosen, Code):
        require_sandbox()
        limits = ChildLimits(seconds=chosen.seconds, memory=chosen.memory_mebibytes * MEBIBYTE, is_sandboxed=True)
    judge = JUDGES[type(chosen)](chosen)
    found = judge_in_children(lambda item: judge(*item), items, limits, until=until)
    scores: list[VerifierScore] = [0.0] * len(responses)
    for place, number in zip(places, found, strict=True):
        scores[place] = number
        if isinstance(chosen, Code) and number is not None:
            tests = len(expected[place])
            scores[place] = {"score": float(number == tests), "tests": number / tests}
    return scores


def _texts(value: Any, column: str) -> list[str]:
    if not are_answers(value):
        raise ValueError(f"the column {column} holds {json.dumps(value)[:80]}, expected {ANSWERS}")
    return [str(each) for each in (value if isinstance(value, list) else [value])]


def _comparing(compare: Callable[[str, str], float], verifier: Comparing) -> Judge:
    """Return a judge that scores a response by its best comparison with any of the right answers."""

    def judge(response: str, answers: Sequence[str]) -> float:
        given = response if verifier.extract is None else _last_match(verifier.extract, response)
        if given is None:
            return 0.0
        right = (_last_match(verifier.extract, answer) or answer for answer in answers)
        return max(compare(given, answer) for answer in right)

    return judge


def _last_match(pattern: str | None, text: str) -> str | None:
    matches = list(re.finditer(pattern, text)) if pattern else []
    return matches[-1][1] if matches else None


def _same_words(given: str, answer: str) -> float:
    """Return the F1 score of two texts' words: lower case, no punctuation, no articles (SQuAD, arXiv:1606.05250)."""
    words, right = (
        ARTICLES.sub(" ", text.lower().translate(str.maketrans("", "", string.punctuation))).split()
        for text in (given, answer)
    )
    common = sum((Counter(words) & Counter(right)).values())
    return 2 * common / (len(words) + len(right)) if common else float(words == right)


def _by_value(verifier: Math) -> Judge:
    """Return the judge of the verifier Math: equality by math-verify; the judging process has the time limit."""
    from math_verify import parse, verify  # imported in the parent, not in each child

    def same_value(given: str, answer: str) -> float:
        gold = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None)
        return float(verify(gold, parse(given, parsing_timeout=None), timeout_seconds=None))

    return _comparing(same_value, verifier)


def _by_schema(verifier: JSONSchema) -> Judge:
    from jsonschema import Draft202012Validator
    from referencing import Registry

    Draft202012Validator.check_schema(verifier.json_schema)
    validator = Draft202012Validator(verifier.json_schema, registry=Registry())  # an empty registry fetches nothing

    def judge(response: str, _: Sequence[str]) -> float:
        document = json.loads(_last_block(response), parse_constant=_refuse)
        return float(validator.is_valid(document))

    return judge


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _last_block(response: str) -> str:
    blocks = BLOCK.findall(response)
    return str(blocks[-1]) if blocks else response


def _by_regex(verifier: Regex) -> Judge:
    pattern = re.compile(verifier.pattern)
    return lambda response, _: float(pattern.search(response) is not None)


def _by_format(verifier: Format) -> Judge:
    """Return the judge of the verifier Format: all tags in order, each exactly once, and no tag in their texts."""

    def judge(response: str, _: Sequence[str]) -> float:
        marks = [mark for tag in verifier.tags for mark in (f"<{tag}>", f"</{tag}>")]
        whole = r"\s*".join(f"<{tag}>(.*)</{tag}>" for tag in verifier.tags)
        is_whole = re.fullmatch(whole, response.strip(), re.DOTALL) is not None
        return float(is_whole and all(response.count(mark) == marks.count(mark) for mark in marks))

    return judge


def _by_length(verifier: Length) -> Judge:
    return lambda response, _: float(verifier.minimum <= len(response.strip()) <= verifier.maximum)


def _by_tests(_: Code) -> Judge:
    return lambda response, tests: float(_passed(_last_block(response), tests))


def _passed(code: str, tests: Sequence[str]) -> int:
    """Return the number of tests that a response's code passes.

    Tests see the names that the code defines, but built-in functions as they were. Once the code has run, nothing here
    is looked up by a name that the code could have changed.
    """
    untouched, run, passed = dict(vars(builtins)), exec, 0
    compiled = [_compiled(test) for test in tests]
    defined: dict[str, Any] = {"__name__": "response"}
    try:
        run(compile(code, "response", "exec"), defined)
    except BaseException:  # noqa: BLE001 SystemExit as well
        return 0
    shared = {name: value for name, value in defined.items() if name not in untouched}
    for test in compiled:
        try:
            run(test, {**shared, "__builtins__": untouched})
        except BaseException:  # noqa: BLE001
            continue
        passed += 1
    return passed


def _compiled(test: str) -> CodeType:
    """Return the compiled code of a test; a text that is no Python becomes a test that fails."""
    try:
        return compile(test, "test", "exec")
    except (SyntaxError, ValueError):
        return compile("assert False", "test", "exec")


JUDGES: Mapping[type[Verifier], Callable[[Any], Judge]] = {
    Math: _by_value,
    ExactMatch: partial(_comparing, lambda given, answer: float(given.strip() == answer.strip())),
    FuzzyMatch: partial(_comparing, _same_words),
    JSONSchema: _by_schema,
    Regex: _by_regex,
    Format: _by_format,
    Length: _by_length,
    Code: _by_tests,
}
"""Class of a verifier -> function that makes the verifier's judge from its options."""
