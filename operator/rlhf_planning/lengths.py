"""Lengths of prompts and responses that a command line gives: a distribution, or a file of lengths."""

import os
import re
from pathlib import Path

from rlhf_api.files import read_text
from rlhf_api.problems import Problem, SpecError
from rlhf_mapper.workload import lengths_around, lognormal

METAVAR = "FILE|MEAN|MEAN,P99|fixed(TOKENS)"
NAMED = re.compile(
    r"(?P<fixed>fixed\()?(?P<around>lognormal\()?(?P<mean>[1-9]\d*)(, *(?P<p99>[1-9]\d*))?(?(fixed)\))(?(around)\))"
)


def lengths_of(text: str, option: str, *, most: int) -> tuple[float, ...]:
    """Return lengths in tokens of at most `most`, by `text` of a command-line option. Raises SpecError.

    text: the mean of a log-normal distribution, and its 99th percentile if it is known (with or without
    `lognormal(...)` around them); `fixed(TOKENS)`; or a file with one length in each line.
    """
    path = f"{option} {text}"
    named = NAMED.fullmatch(text)
    if named is None and os.access(text, os.F_OK):
        lines = read_text(Path(text), path).split()
        wrong = next((line for line in lines if not (line.isdecimal() and 1 <= int(line) <= most)), "")
        if wrong or not lines:
            found = f"has {wrong}" if wrong else "is empty"
            raise SpecError([Problem(path, f"{found}, expected a number of tokens from 1 to {most} in each line")])
        return tuple(map(float, lines))
    mean, p99 = (int(named["mean"]), int(named["p99"] or 0)) if named else (0, 0)
    if named is None or mean > most or (p99 and named["fixed"]) or (named["around"] and not p99):
        raise SpecError([Problem(path, f"is no MEAN, MEAN,P99 or fixed(TOKENS) of at most {most} tokens, and no file")])
    if named["fixed"]:
        return (float(mean),)
    try:
        return lognormal(mean, p99, most=most) if p99 else lengths_around(mean, most)
    except ValueError as error:
        raise SpecError([Problem(path, f"cannot be: {error}")]) from None
