"""`python -m helm.dashboards` writes the dashboards into the chart, from the YAML files beside this one.

A file has rows of panels by their titles. A panel says what it shows and what to look for (`about`), its `unit`,
whether its curves are `stacked`, and its queries in PromQL by their legends. Panels of the row Now show the latest
value of a query instead of curves; with `named` the name of the series.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "rlhf-operator" / "files" / "dashboards"
SCHEMA = 39
"""Version of Grafana's JSON model; newer versions of Grafana read it, too."""
WIDTH = 24
"""Columns of Grafana's grid."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
OPTIONS = ("about", "unit", "stacked", "named")
"""What of a panel is no query."""


def generated() -> Mapping[Path, str]:
    """Every file and what belongs in it."""
    return {FOLDER / f"{path.stem}.json": _dashboard(path.read_text()) for path in sorted(HERE.glob("*.yaml"))}


def _dashboard(text: str) -> str:
    """A dashboard in Grafana's JSON model."""
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    told = yaml.safe_load(text)
    document = {
        "uid": told["uid"],
        "title": told["title"],
        "description": told["about"],
        "tags": ["rlhf"],
        "schemaVersion": SCHEMA,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, *map(_variable, told["variables"])]},
        "panels": list(_panels(told["rows"], told["short"])),
    }
    return json.dumps(document, indent=2) + "\n"


def _variable(told: Mapping[str, Any]) -> dict[str, Any]:
    """What a person chooses at the top: one value, or also all of them, as a regular expression."""
    every = told.get("all", False)
    return {
        "name": told["name"],
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": told["query"], "refId": told["name"]},
        "refresh": 2,
        "sort": 1,
        "includeAll": every,
        "multi": every,
        **({"allValue": ".*", "current": {"text": "All", "value": "$__all"}} if every else {}),
    }


def _panels(rows: Mapping[str, Mapping[str, Any]], short: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    number, top = 1, 0
    for title, panels in rows.items():
        row = {"id": number, "type": "row", "title": title, "collapsed": False, "panels": []}
        yield {**row, "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1}}
        number, top, left = number + 1, top + 1, 0
        is_now = title == "Now"
        width, height = (WIDTH // len(panels), 4) if is_now else (WIDTH // 3, 8)
        for name, panel in panels.items():
            document = {
                "id": number,
                "type": "stat" if is_now else "timeseries",
                "title": name,
                "description": panel["about"],
                "datasource": DATASOURCE,
                "gridPos": {"x": left, "y": top, "w": width, "h": height},
                "targets": list(_targets(panel, short)),
            }
            yield document | (_number(panel) if is_now else _curves(panel))
            number, left = number + 1, left + width
            if left + width > WIDTH:
                left, top = 0, top + height
        top += height if left else 0


def _targets(panel: Mapping[str, str], short: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    queries = [(legend, query) for legend, query in panel.items() if legend not in OPTIONS]
    for index, (legend, query) in enumerate(queries):
        long = reduce(lambda text, name: text.replace(name, short[name]), short, query)
        yield {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": long, "legendFormat": legend}


def _number(panel: Mapping[str, Any]) -> dict[str, Any]:
    options = {"textMode": "name" if panel.get("named") else "auto", "colorMode": "none"}
    return _looks(panel, {}, {**options, "reduceOptions": {"calcs": ["lastNotNull"]}})


def _curves(panel: Mapping[str, Any]) -> dict[str, Any]:
    fill, mode = (40, "normal") if panel.get("stacked") else (0, "none")
    drawn = {"fillOpacity": fill, "stacking": {"mode": mode}, "spanNulls": True}
    return _looks(
        panel, drawn, {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    )


def _looks(panel: Mapping[str, Any], drawn: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {"unit": panel.get("unit", "short"), "custom": drawn}
    return {"fieldConfig": {"defaults": defaults, "overrides": []}, "options": options}


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
