"""Reader of a Hydra configuration: a YAML file, or the overrides in a script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_importers.shell import only_document, scalar, words


def read(text: str, source: str) -> dict[str, Any]:
    """Return dotted keys and values of a Hydra configuration file, or of the overrides in a script."""
    if re.search(r"^\s*[+~]*[\w.]+=", text.replace("\\\n", "\n"), re.MULTILINE) or "main_ppo" in text:
        pairs = (
            word.lstrip("+").partition("=") for word in words(text, source) if re.match(r"\+{0,2}\w+[\w.]*\.\w+=", word)
        )
        return {key: scalar(value) for key, _, value in pairs}
    kept = re.sub(r"(^\s*|[{,]\s*)n(?=\s*:)", r"\1'n'", text, flags=re.MULTILINE)  # kubectl's YAML takes n for no
    values = dict(_flat(only_document(kept, source), ""))
    return {key: _resolved(value, values) for key, value in values.items()}


def _flat(part: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(part, dict) and part:
        for key, below in part.items():
            yield from _flat(below, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, part


def _resolved(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a value of a Hydra configuration with an interpolation `${key}` replaced; None if the key is unknown."""
    named = re.fullmatch(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,(.*))?\}", value) if isinstance(value, str) else None
    if not named:
        return None if value == "???" else value
    return values.get(named[1], scalar(named[2]) if named[2] else None)
