"""Rendering of HTML pages from templates: texts of models and users are escaped, and a page loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from rlhf_planning.numbers import duration, number, shortened, step_list

FILTERS = (duration, number, shortened, step_list)


def rendered(template: str, variables: Mapping[str, Any], *, filters: tuple[Callable[..., Any], ...] = ()) -> str:
    """Return the HTML page that a template makes of the variables; `filters` are available in it by their names."""
    environment = Environment(
        loader=PackageLoader("rlhf_trainer.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {shown.__name__: shown for shown in (*FILTERS, *filters)}
    return environment.get_template(template).render(variables)
