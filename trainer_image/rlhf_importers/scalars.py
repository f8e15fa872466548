"""Values of other projects' options as YAML reads them; no reader of scripts is needed for them."""

from typing import Any

from rlhf_api.kubectl_yaml import read
from rlhf_api.problems import SpecError

UNKNOWN = "\0"
"""Mark around a part of a word that only a run of the script knows."""


def scalar(text: str) -> Any:
    """Return a word of a script as YAML reads it: a number, a boolean, a list or text."""
    try:
        return text if UNKNOWN in text else read(text, "")[0]
    except (SpecError, IndexError):
        return text
