"""Changes of documents, texts and bytes, all drawn from a random generator that the caller seeds."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from rlhf_api import kubectl_yaml

LONG, DEEP, DEEPEST = 5000, 60, 3000
TEXTS = (
    *("", " ", "null", "true", "-1", "1e400", "NaN", "..", "../../etc", "/dev/zero/x", "x" * LONG, "Ünï\u202e\u0301"),
    *("\x00", "\x1b[31m", "\u2028", "\ud800", "😀" * 50, "a\nb", "%s{0}$(x)", "${X}", "hf://", "hf://a/b/c", "file://"),
    *("file:///proc/self/mem", "file://%ff%00", "job://", "job://job", "pvc://", "pvc://a/../b", "s3://", "gs://x"),
    *("package://", "package://os/x", "http://[::1", "https://a:b@c", "a.b:c", "nan", "1_000", "0x10", "10Gi", "1e3Mi"),
    *("9999-12-31T23:59:59Z", "0001-01-01T00:00:00+14:00", "2026-13-77T99:99:99Z"),
)
NUMBERS = (0, -1, 1, 2**31, 2**63 - 1, 2**63, 10**40, 10**400, -0.0, 0.1, 1e308, 5e-324, math.inf, -math.inf, math.nan)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": None}, {"name": {}}, {"\ud800": 1})
YAML = (
    *(
        "&a ",
        "*a",
        "*none",
        "<<: *a",
        "<<: [1]",
        "!!timestamp x",
        "!!timestamp 2001-99-99",
        "!!binary é",
        "!!set {a, b}",
    ),
    *(
        "!!python/object/apply:os.system [id]",
        "!!omap [a]",
        "!!int x",
        "!!float x",
        "!!bool x",
        "!!null x",
        "!x y",
        "!",
    ),
    *("? [a, b]\n: c\n", "? {a: b}\n", "---\n", "...\n", "%YAML 9.9\n---\n", "%TAG ! x\n", "\t", "{", "]", ": ", "- "),
    *("|\n", ">-9\n", "\ufeff", "0x_", "0b_", "0o_", "0o8", "+.inf", ".nan", "1e999", "0" * 5000, "1" * 5000, "~", "="),
    *('"\\ud800"', '"\\U0010FFFF"', "'", '"', "#", "@", "`", "\x00", "\x85", "\r", "y", "on", "1:30", "2001-01-01"),
    "[" * DEEPEST,
    "{a: " * DEEPEST,
    "- " * DEEPEST,
    "x: &b [*b, *b]\n",
)


def odd(dice: random.Random) -> Any:
    """A value that hardly anybody would write."""
    kind = dice.randrange(8)
    if kind < 3:
        return dice.choice(TEXTS)
    if kind < 5:
        return dice.choice(NUMBERS)
    return copy.deepcopy(dice.choice(OTHERS)) if kind < 7 else deep(dice)


def deep(dice: random.Random) -> Any:
    """Lists or mappings in one another."""
    value: Any = 1
    for _ in range(dice.choice((3, DEEP))):
        value = [value] if dice.random() < 0.5 else {"a": value}
    return value


def damaged(dice: random.Random, document: Any) -> Any:
    """A copy of a JSON document with one to four changes."""
    root = [copy.deepcopy(document)]
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        if not (places := list(_places(root))):
            break
        holder, key = dice.choice(places)
        dice.choice(CHANGES)(dice, holder, key, places)
    return root[0] if root else None


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(list or mapping, index or key) of everything below a value."""
    entries = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, each in entries:
        yield value, key
        if isinstance(each, dict | list):
            yield from _places(each)


Place = tuple[Any, Any]
Change = Callable[[random.Random, Any, Any, list[Place]], None]


def _replace(dice: random.Random, holder: Any, key: Any, _: list[Place]) -> None:
    holder[key] = odd(dice)


def _drop(_: random.Random, holder: Any, key: Any, __: list[Place]) -> None:
    del holder[key]


def _repeat(dice: random.Random, holder: Any, key: Any, _: list[Place]) -> None:
    if isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(holder[key]) for _ in range(dice.choice((1, 3, 100)))]
    else:
        holder[f"{key}{dice.choice(('2', '.', ' '))}"] = copy.deepcopy(holder[key])


def _retype(dice: random.Random, holder: Any, key: Any, _: list[Place]) -> None:
    value = holder[key]
    made: tuple[Callable[[], Any], ...] = (
        lambda: [value],
        lambda: {"name": value},
        lambda: json.dumps(value),
        lambda: list(value) if isinstance(value, dict) else str(value),
        lambda: -value if isinstance(value, int | float) else {str(value): value},
    )
    holder[key] = dice.choice(made)()


def _rename(dice: random.Random, holder: Any, key: Any, places: list[Place]) -> None:
    new = dice.choice((*TEXTS, *(str(each) for _, each in places)))
    if isinstance(holder, dict):
        holder[new] = holder.pop(key)


def _take_another(dice: random.Random, holder: Any, key: Any, places: list[Place]) -> None:
    other, place = dice.choice(places)
    holder[key] = copy.deepcopy(other[place])


CHANGES: tuple[Change, ...] = (_replace, _replace, _drop, _repeat, _retype, _rename, _take_another)


def garbled(dice: random.Random, text: str, pieces: tuple[str, ...] = TEXTS) -> str:
    """A text with one to three pieces cut out, doubled, moved or put in."""
    for _ in range(dice.choice((1, 1, 2, 3))):
        start = dice.randrange(len(text) + 1)
        stop = min(len(text), start + dice.choice((0, 1, 1, 8, 200)))
        piece = dice.choice((dice.choice(pieces), "", text[start:stop] * 2, text[stop : stop + 40]))
        text = text[:start] + piece + text[stop:]
    return text[: dice.randrange(len(text) + 1)] if dice.random() < 0.1 else text


def torn(dice: random.Random, data: bytes) -> bytes:
    """Bytes of a file that was cut off, or of which some were written wrongly."""
    if not data or dice.random() < 0.4:
        return data[: dice.randrange(len(data) + 1)]
    found = bytearray(data)
    for _ in range(dice.choice((1, 3, 50))):
        found[dice.randrange(len(found))] = dice.randrange(256)
    return bytes(found)


def as_yaml(dice: random.Random, documents: Any) -> str:
    """Documents as YAML that may have oddities of that language."""
    text = "---\n".join(map(_written, documents if isinstance(documents, list) else [documents]))
    return garbled(dice, text, YAML) if dice.random() < 0.3 else text


def _written(document: Any) -> str:
    try:
        return kubectl_yaml.write(document)
    except (ValueError, RecursionError):
        return as_json(document) + "\n"


def as_json(document: Any) -> str:
    """JSON as Python reads it: with NaN."""
    return json.dumps(document)


def encoded(text: str) -> bytes:
    """UTF-8, but halves of characters as they are."""
    return text.encode("utf-8", "surrogatepass")
