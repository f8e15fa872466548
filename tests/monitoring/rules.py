"""The chart's alerts and dashboards as promtool reads them."""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.capabilities import required
from tests.cluster.processes import output_of
from tests.helm.rendering import Helm, Values, the
from tests.repo.tree import ROOT

ALERTS = {"monitoring": {"alerts": {"enabled": True}}}
DASHBOARDS = ROOT / "helm" / "rlhf-operator" / "files" / "dashboards"
CHOSEN = {"$__rate_interval": "5m", "$__range": "1h", "$namespace": "team", "$job": "ppo"}
"""What Grafana would put there."""

Series = Mapping[str, str]
"""A series in Prometheus' notation -> its values, one a minute."""


def alerts(helm: Helm, **values: str) -> dict[str, dict[str, Any]]:
    """The alerting rules that the chart renders, by name; values: more of monitoring.alerts."""
    return alerts_of(helm, {"monitoring": {"alerts": {"enabled": True, **values}}})


def alerts_of(helm: Helm, values: Values) -> dict[str, dict[str, Any]]:
    """The alerting rules that the chart renders for some values, by name."""
    groups = the(helm.template(values), "PrometheusRule")["spec"]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def queries() -> list[str]:
    """Of all panels."""
    found = []
    for file in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"]
                for name, value in CHOSEN.items():
                    query = query.replace(name, value)
                found.append(query)
    return found


def require_promtool() -> None:
    """Skip the test without the package prometheus; fail it where tests of the cluster are required."""
    if not shutil.which("promtool"):
        (pytest.fail if required() else pytest.skip)("promtool is missing; install the package prometheus")


def promtool(command: str, *arguments: object, text: str | None = None) -> str:
    """What `promtool COMMAND ...` prints; FailedError with its complaint."""
    require_promtool()
    return output_of("promtool", *command.split(), *arguments, text=text)


def lint(exposition: bytes) -> str:
    """What `promtool check metrics` complains about, for what a port serves."""
    require_promtool()
    done = subprocess.run(["promtool", "check", "metrics"], input=exposition, capture_output=True, check=False)
    return (done.stdout + done.stderr).decode()


def file_of_tests(folder: Path, rules: Sequence[Mapping[str, Any]], tests: Sequence[Mapping[str, Any]]) -> Path:
    """A file for `promtool test rules`."""
    groups = {"groups": [{"name": "chart", "rules": [dict(rule) for rule in rules]}]}
    (folder / "rules.yml").write_text(yaml.safe_dump(groups))
    file = folder / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": list(tests)}))
    return file


def input_of(series: Series) -> list[dict[str, str]]:
    """As promtool wants series."""
    return [{"series": name, "values": values} for name, values in series.items()]
