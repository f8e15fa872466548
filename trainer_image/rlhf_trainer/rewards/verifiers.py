"""The verifiers of `reward: {verifier: ...}` as one reward function; `rlhf_api.spec.verifiers` has their options."""

import json
import math
import os
import re
import string
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from typing import Any, Final

from rlhf_api.spec import verifiers as spec
from rlhf_trainer.rewards.code_tests import passed_tests, read_tests, unpacked
from rlhf_trainer.rewards.sample import SCORE, STOPPED
from rlhf_trainer.rewards.supervision import MEBIBYTE, ChildLimits, judge_in_children, require_sandbox
from rlhf_trainer.thoughts import BEGUN, THOUGHTS

OPTIONS: Final = "verifier()"
JUDGING_SHARE = 0.8
"""Share of a call's time limit after which the verifier judges no further response."""
JUDGEMENT_SECONDS = 5.0
"""Most CPU time of a response: some regular expressions and formulas never end."""
BLOCK = re.compile(r"```[^\S\n]*(\w*)[^\n`]*\n(.*?)```", re.DOTALL)
PYTHON = ("python", "py", "python3")
ARTICLES = re.compile(r"\b(a|an|the)\b")
CODES = r"(?:USD|EUR|GBP|INR|JPY|CNY|CHF|US(?=\\?\$)|Rs\.?)"
SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Word after a number -> exponent of ten."""
WORD = "((?:m|b|tr)illion|thousand)"
SCALED = re.compile(rf"(?<![\d,])(\d[\d,]*(?:\.\d+)?)(?:\s|\\[,;! ])*(?:\\text\{{\s*{WORD}\}}|(\\text\{{\s*)?{WORD}\b)")
"""Pattern of a number with a word of SCALES after it."""
NUMBERS: Final[Mapping[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = {
    re.compile("[\u2212\u00d7\u00b7]"): lambda match: {"\u2212": "-", "\u00d7": "\\times "}.get(match[0], "\\cdot "),
    re.compile("[\u00bc-\u00be\u2150-\u215e]"): lambda match: f" {_ascii(match)}",
    re.compile("[\u00b2\u00b3\u00b9\u2070-\u207b]+"): lambda match: f"^{{{_ascii(match)}}}",
    re.compile(r"\u221a *(\w+|\([^()]*\))"): r"\\sqrt{\1}",
    re.compile(r"(?<![\w)}\]*`])(\*{1,3}|`+)(?=\S)([^*`]+)\1(?![\w(\[{*`])"): r"\2",
    re.compile(r"\\(?:answer|ans|fbox)\{"): r"\\boxed{",
    re.compile(r"(?<![\\A-Za-z])(pi|sin|cos|tan|log|ln|theta)(?![A-Za-z])"): r"\\\1",
    re.compile(rf"\b{CODES}\s*(?=[\\$]*\d)|(?<=\d)\s?{CODES}\b"): "",
    re.compile(r"(?<!\\)\\\$|[\u00a3\u00a5\u20a0-\u20bf]"): "",
    re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!;: ])(?=\d{3}(?!\d))"): "",
    re.compile(r"(?<![\d.])(\d+) +(\d+)/(\d+)"): lambda match: (
        f"{int(match[1]) * int(match[3]) + int(match[2])}/{match[3]}"
    ),
    re.compile(r"\d+(?:\.\d+)?[eE][-+]?\d{1,2}(?![\d.])"): lambda match: f"{Decimal(match[0]):f}",
}
"""Pattern -> text that math-verify reads instead, for signs of other alphabets and for bold text."""
UNIT = re.compile(r"(?:\\text\{)?\s*([-+]?[\d.,]+)\s+((?:[A-Za-z][A-Za-z ]{2,}|[ckm]?m|ft|in)(?:\^\{[23]\})?)\}?")
"""Pattern of a number with words for its unit."""
COMMANDS = re.compile(r"\\text\{[^{}]*\}|\\[A-Za-z]+|sqrt|infinity")
WORDS = re.compile(r"(?:[A-Z][a-z]{2,}\.? \d.*|\D*[A-Za-z]{4}\D*|.*\d [A-Za-z]{4}.*\d [A-Za-z]{4}.*|[A-Za-z]{3})")
"""Pattern of an answer in words, such as a date; it is tried after COMMANDS of LaTeX are removed."""
ANSWER = re.compile(r"(?is)<answer>((?:(?!<answer>).)*)</answer>")
MAX_LANES, MAX_SOLUTIONS = 32, 3
"""Most child processes that judge at a time, and most solutions of a row that are tried."""
VerifierScore = float | None | dict[str, float | None]
Judge = Callable[[str, Any], float]
"""Function (the assistant's turn, the row's right answers or tests) -> score; for Code the number of passed tests."""


def score(prompts: list[str], responses: list[str], finished: list[bool], /, **given: Any) -> list[VerifierScore]:
    """Return a score from 0 to 1 for each response; None for those that are not judged within the time limit.

    given: columns by name, and under the key OPTIONS, which no column can have, (verifier as JSON types, time limit in
    seconds, number of ranks that share the CPUs).
    """
    verifier, seconds, ranks = given.pop(OPTIONS)
    until = time.monotonic() + JUDGING_SHARE * seconds
    chosen = spec.VERIFIERS[verifier["name"]].model_validate(verifier)
    column = next(iter(chosen.columns), None)
    expected = [expectation(chosen, value) for value in given[column]] if column else [()] * len(responses)
    places = [place for place, is_finished in enumerate(finished) if is_finished]
    items = [(_turn(chosen, prompts[place], responses[place]), expected[place]) for place in places]
    limits = ChildLimits(seconds=JUDGEMENT_SECONDS, memory=1024 * MEBIBYTE)
    if isinstance(chosen, spec.Code):
        require_sandbox()
        limits = ChildLimits(seconds=chosen.seconds, memory=chosen.memory_mebibytes * MEBIBYTE, is_sandboxed=True)
    judge = JUDGES[type(chosen)](chosen)
    lanes = max(1, min(MAX_LANES, len(os.sched_getaffinity(0)) // ranks))
    parts = [items[lane::lanes] for lane in range(lanes)]
    with ThreadPoolExecutor(lanes) as pool:
        done = [*pool.map(lambda part: judge_in_children(lambda item: judge(*item), part, limits, until=until), parts)]
    found = [done[place % lanes][place // lanes] for place in range(len(items))]
    scores: list[VerifierScore] = [0.0] * len(responses)
    for place, number in zip(places, found, strict=True):
        scores[place] = number
        if number is not None and math.isnan(number):
            scores[place] = {SCORE: 0.0, STOPPED: 1.0}
        elif isinstance(chosen, spec.Code) and number is not None:
            tests = len(expected[place])
            scores[place] = {SCORE: float(number == tests), "tests": number / tests}
    return scores


def expectation(verifier: spec.Verifier, value: Any) -> Sequence[Any]:
    """Return the right answers as texts, or the tests, in a row's column; ValueError for a value without any."""
    if isinstance(verifier, spec.Code):
        return read_tests(value)
    if not spec.are_answers(value):
        raise ValueError(f"the column {verifier.columns[0]} holds {json.dumps(value)[:80]}, expected {spec.ANSWERS}")
    texts = [str(each) for each in (value if isinstance(value, list) else [value])]
    pattern = verifier.answer_extract if isinstance(verifier, spec.Comparing) else None
    found = [_last_match(pattern, text) if pattern else text for text in texts]
    if None in found:
        raise ValueError("holds no match of answerExtract")
    return found


def right_responses(verifier: spec.Verifier, columns: Mapping[str, Any]) -> list[str]:
    """Return responses made from a row's columns, one of which must get the full score; ValueError as `expectation`."""
    answers = expectation(verifier, columns[verifier.columns[0]])
    if isinstance(verifier, spec.Code):
        known = unpacked(columns[verifier.solution_key]) if verifier.solution_key else []
        return [str(each) for each in (known if isinstance(known, list) else [known])][:MAX_SOLUTIONS]
    if not isinstance(verifier, spec.Math):
        return [*answers]
    formulas = [_as_formula(each) for each in answers]
    if all(WORDS.fullmatch(COMMANDS.sub("", each).strip("$ ")) for each in formulas):
        raise ValueError("is in words, which ExactMatch and FuzzyMatch compare")
    return formulas


def _turn(verifier: spec.Verifier, prompt: str, response: str) -> str:
    """Return the assistant's whole turn: the response, after a tag of a thought that ends the prompt."""
    own = rf"<({'|'.join(verifier.tags)})>\s*(</\1>\s*)?\Z" if isinstance(verifier, spec.Format) else BEGUN
    begun = None if isinstance(verifier, spec.Length) else re.search(own, prompt)
    return (begun[0] if begun else "") + response


def _ascii(match: re.Match[str]) -> str:
    """Return fractions and superscripts of Unicode as digits."""
    return unicodedata.normalize("NFKC", match[0]).replace("\u2044", "/").replace("\u2212", "-")


def _scaled(match: re.Match[str]) -> str:
    """Return the number that a match of SCALED means, such as 36000000 for 36 million."""
    return f"{Decimal(match[1].replace(',', '')).scaleb(SCALES[match[2] or match[4]]):f}{match[3] or ''}"


def _plain_numbers(text: str) -> str:
    """Return a text whose numbers are written as math-verify reads them."""
    for pattern, plain in NUMBERS.items():
        text = pattern.sub(plain, text)
    return text


def _comparing(compare: Callable[[str, str], float], verifier: spec.Comparing) -> Judge:
    """Return a judge that scores a response by its best comparison with any of the right answers."""

    def judge(turn: str, answers: Sequence[str]) -> float:
        text = THOUGHTS.sub("", turn)
        pattern = verifier.response_extract
        given = _last_match(pattern, text) if pattern else [text, *ANSWER.findall(text)][-1]
        return 0.0 if given is None else max(compare(given, answer) for answer in answers)

    return judge


def _last_match(pattern: str, text: str) -> str | None:
    matches = list(re.finditer(pattern, text))
    return matches[-1][1] if matches else None


def _same_words(given: str, answer: str) -> float:
    """Return the F1 score of two texts' words: lower case, no punctuation, no articles (SQuAD, arXiv:1606.05250)."""
    words, right = (
        ARTICLES.sub(" ", text.lower().translate(str.maketrans("", "", string.punctuation))).split()
        for text in (given, answer)
    )
    common = sum((Counter(words) & Counter(right)).values())
    return 2 * common / (len(words) + len(right)) if common else float(words == right)


def _by_value(verifier: spec.Math) -> Judge:
    """Return the judge of the verifier Math: equality by math-verify. Its timeouts are off: each child has a limit."""
    from math_verify import parse, verify  # imported in the parent, not in each child

    def same_value(given: str, answer: str) -> float:
        gold = [each for each in parse(_as_formula(answer), parsing_timeout=None) if not isinstance(each, str)]
        plain = _plain_numbers(given)
        last = plain[max(plain.rfind("\\boxed"), 0) :]
        readings = [parse(each, parsing_timeout=None) for each in dict.fromkeys([last, SCALED.sub(_scaled, last)])]
        return float(any(verify(gold, each, timeout_seconds=None) for each in readings))

    return _comparing(same_value, verifier)


def _as_formula(answer: str) -> str:
    """Return a right answer as LaTeX that is marked as a formula, without signs of currency."""
    plain = re.sub(r"(?<=\d) (?=\d{3}(?!\d))", "", _plain_numbers(answer).strip()).replace("{,}", ",")
    plain = SCALED.sub(_scaled, plain.replace("$", "").strip() if plain.count("$") == 1 else plain)
    plain = UNIT.sub(r"\1\\text{ \2}", plain) if UNIT.fullmatch(plain) else plain
    is_marked = "$" in plain or any(mark in plain for mark in ("\\boxed", "\\(", "\\["))
    return plain if is_marked else "${}$".format(plain.replace("$", "").strip())


def _by_schema(verifier: spec.JSONSchema) -> Judge:
    from jsonschema import Draft202012Validator
    from referencing import Registry

    Draft202012Validator.check_schema(verifier.json_schema)
    validator = Draft202012Validator(verifier.json_schema, registry=Registry())  # an empty registry fetches nothing

    def judge(response: str, _: Sequence[str]) -> float:
        document = json.loads(_last_block(response, "json"), parse_constant=_refuse)
        return float(validator.is_valid(document))

    return judge


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _last_block(response: str, *languages: str) -> str:
    """Return the last fenced block after the thoughts, in one of the languages if possible; without blocks all text."""
    text = THOUGHTS.sub("", response)
    blocks = BLOCK.findall(text)
    return str([text, *(each for _, each in blocks), *(each for mark, each in blocks if mark.lower() in languages)][-1])


def code_in(verifier: spec.Code, prompt: str, response: str) -> str:
    return _last_block(_turn(verifier, prompt, response), *PYTHON)


def _by_format(verifier: spec.Format) -> Judge:
    """Return the judge of the verifier Format: all tags in order, each exactly once, and no tag in their texts."""

    def judge(response: str, _: Sequence[str]) -> float:
        marks = [mark for tag in verifier.tags for mark in (f"<{tag}>", f"</{tag}>")]
        whole = r"\s*".join(f"<{tag}>(.*)</{tag}>" for tag in verifier.tags)
        is_whole = re.fullmatch(whole, response.strip(), re.DOTALL) is not None
        return float(is_whole and all(response.count(mark) == marks.count(mark) for mark in marks))

    return judge


JUDGES: Mapping[type[spec.Verifier], Callable[[Any], Judge]] = {
    spec.Math: _by_value,
    spec.ExactMatch: partial(_comparing, lambda given, answer: float(given.strip() == answer.strip())),
    spec.FuzzyMatch: partial(_comparing, _same_words),
    spec.JSONSchema: _by_schema,
    spec.Regex: lambda each: lambda response, _: float(re.search(each.pattern, response) is not None),
    spec.Format: _by_format,
    spec.Length: lambda each: lambda response, _: float(each.minimum <= len(response.strip()) <= each.maximum),
    spec.Code: lambda _: lambda response, tests: float(passed_tests(_last_block(response, *PYTHON), tests)),
}
"""Class of a verifier -> function that makes the verifier's judge from its options."""
