"""A dashboard in Grafana's own JSON model, from rows of panels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA = 39
"""Version of the model; newer versions of Grafana read it, too."""
WIDTH = 24
"""Columns of Grafana's grid."""
HEIGHTS = {"stat": 4, "timeseries": 8}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
Unit = Literal["short", "s", "bytes", "percentunit", "none", "Bps", "FLOPs"]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Queries that are drawn together."""

    title: str
    about: str
    """What it shows, and what to look for."""
    queries: Mapping[str, str]
    """Legend -> query in PromQL."""
    unit: Unit = "short"
    kind: Literal["stat", "timeseries"] = "timeseries"
    stacked: bool = False
    named: bool = False
    """Of a stat: whether it shows the name of the series instead of its value."""

    def document(self, number: int, place: Mapping[str, int]) -> dict[str, Any]:
        """The panel in the JSON model."""
        targets = [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(self.queries.items())
        ]
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.about,
            "datasource": DATASOURCE,
            "gridPos": dict(place),
            "targets": targets,
            "fieldConfig": {"defaults": {"unit": self.unit, "custom": self._drawn()}, "overrides": []},
            "options": self._options(),
        }

    def _drawn(self) -> dict[str, Any]:
        if self.kind == "stat":
            return {}
        fill = 40 if self.stacked else 0
        return {"fillOpacity": fill, "stacking": {"mode": "normal" if self.stacked else "none"}, "spanNulls": True}

    def _options(self) -> dict[str, Any]:
        if self.kind == "stat":
            shown = {"textMode": "name" if self.named else "auto", "colorMode": "none"}
            return {**shown, "reduceOptions": {"calcs": ["lastNotNull"]}}
        return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}


@dataclass(frozen=True, kw_only=True)
class Variable:
    """What a person chooses at the top."""

    name: str
    query: str
    all: bool = False
    """Whether all values can be chosen at once, as a regular expression."""

    def document(self) -> dict[str, Any]:
        """The variable in the JSON model."""
        return {
            "name": self.name,
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": self.query, "refId": self.name},
            "refresh": 2,
            "sort": 1,
            "includeAll": self.all,
            "multi": self.all,
            **({"allValue": ".*", "current": {"text": "All", "value": "$__all"}} if self.all else {}),
        }


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """Rows of panels by their titles."""

    uid: str
    title: str
    about: str
    variables: Sequence[Variable]
    rows: Mapping[str, Sequence[Panel]]

    def document(self) -> dict[str, Any]:
        """The dashboard in the JSON model."""
        source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.about,
            "tags": ["rlhf"],
            "schemaVersion": SCHEMA,
            "editable": True,
            "refresh": "30s",
            "time": {"from": "now-6h", "to": "now"},
            "templating": {"list": [source, *(variable.document() for variable in self.variables)]},
            "panels": list(self._panels()),
        }

    def _panels(self) -> Iterator[dict[str, Any]]:
        number, top = 1, 0
        for title, panels in self.rows.items():
            row = {"id": number, "type": "row", "title": title, "collapsed": False, "panels": []}
            yield {**row, "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1}}
            number, top, left = number + 1, top + 1, 0
            width = WIDTH // (len(panels) if panels[0].kind == "stat" else 3)
            for panel in panels:
                height = HEIGHTS[panel.kind]
                yield panel.document(number, {"x": left, "y": top, "w": width, "h": height})
                number, left = number + 1, left + width
                if left + width > WIDTH:
                    left, top = 0, top + height
            top += HEIGHTS[panels[-1].kind] if left else 0
