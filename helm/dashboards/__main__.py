"""`python -m helm.dashboards`: generator of the chart's dashboards, from the YAML files beside this one.

It also writes the pages of metrics (`reference.py`). A YAML file has rows of panels by their titles. A panel has
queries in PromQL by their legends, a description (`about`), a `unit`, and perhaps `stacked` curves. A panel without
`about` or `unit` takes them from the metrics of its queries. Panels of the row Now show the latest value of a query
instead of curves, with `named` the name of the series.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from helm.dashboards.reference import pages
from rlhf_operator.metrics import JOB_METRICS, OPERATOR_METRICS, Metric
from rlhf_trainer.run_folder.step_metrics import METRICS as STEP_METRICS
from rlhf_trainer.run_folder.step_metrics import StepMetric

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "rlhf-operator" / "files" / "dashboards"
SCHEMA = 39
"""Version of Grafana's JSON model; newer versions of Grafana read it, too."""
WIDTH = 24
"""Columns of Grafana's grid."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
OPTIONS = ("about", "unit", "stacked", "named")
"""Keys of a panel that are no query."""
UNITS = {"ratio": "percentunit", "seconds": "s", "bytes": "bytes"}
"""Unit of a metric -> Grafana's unit; others are plain numbers."""
METRICS: dict[str, StepMetric | Metric] = {
    **{metric.name: metric for metric in STEP_METRICS},
    **{metric.name: metric for metric in OPERATOR_METRICS},
    **{metric.name: metric for metric in JOB_METRICS},
}
"""Every metric by its name for Prometheus."""


def generated() -> Mapping[Path, str]:
    """Return the text of every dashboard by its path."""
    return {FOLDER / f"{path.stem}.json": _dashboard(path.read_text()) for path in sorted(HERE.glob("*.yaml"))}


def _dashboard(text: str) -> str:
    """Return a dashboard in Grafana's JSON model."""
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    content = yaml.safe_load(text)
    document = {
        "uid": content["uid"],
        "title": content["title"],
        "description": content["about"],
        "tags": ["rlhf"],
        "schemaVersion": SCHEMA,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, *map(_variable, content["variables"])]},
        "panels": list(_panels(content["rows"], content["short"])),
    }
    return json.dumps(document, indent=2) + "\n"


def _variable(variable: Mapping[str, Any]) -> dict[str, Any]:
    """Return a choice at the top of a dashboard: one value or, with `all`, also all of them by a regular expression."""
    every = variable.get("all", False)
    return {
        "name": variable["name"],
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": variable["query"], "refId": variable["name"]},
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
                "description": panel.get("about") or " ".join(each.meaning for each in _metrics_of(panel)),
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


def _metrics_of(panel: Mapping[str, Any]) -> list[StepMetric | Metric]:
    """Return the metrics that the queries of a panel name."""
    queries = " ".join(query for legend, query in panel.items() if legend not in OPTIONS)
    names = dict.fromkeys(re.sub(r"_(sum|count|bucket)$", "", name) for name in re.findall(r"rlhf_\w+", queries))
    return [METRICS[name] for name in names]


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
    units = {UNITS.get(each.unit, "short") for each in _metrics_of(panel)}
    unit = panel.get("unit") or (units.pop() if len(units) == 1 else "short")
    defaults = {"unit": unit, "custom": drawn}
    return {"fieldConfig": {"defaults": defaults, "overrides": []}, "options": options}


if __name__ == "__main__":
    for path, text in {**generated(), **pages()}.items():
        path.write_text(text, encoding="utf-8")
