"""Fills a template: texts of models and users are escaped, and a page may load nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rlhf_planning.numbers import duration, number, shortened, step_list

FILTERS = (duration, number, shortened, step_list)


def rendered(template: str, variables: Mapping[str, Any], *, filters: tuple[Callable[..., Any], ...] = ()) -> str:
    """The page by a template, which has functions as filters by their names."""
    environment = Environment(
        loader=PackageLoader("rlhf_trainer.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {shown.__name__: shown for shown in (*FILTERS, *filters)}
    return environment.get_template(template).render(variables)


def script(name: str) -> dict[str, str]:
    """For a page that runs one of our scripts: its text, and its digest, by which a browser runs no other."""
    text = (files("rlhf_trainer.report") / "templates" / name).read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return {"script": Markup(text), "digest": digest}  # safe: it is ours
