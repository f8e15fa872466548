"""Numbers in the chart's templates that no program checks: probes and alerts; read as text, without helm."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.helm.rendering import CHART

TEMPLATES = CHART / "templates"
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[smh]?\b")
FAILURES = 3
"""Failed probes in a row after which Kubernetes acts, where a probe says nothing else."""
SECONDS = {"startupProbe": 60, "livenessProbe": 45, "readinessProbe": 15}
"""A slow start has a minute; a hanging operator is started again after 45 s, and asked no more after 15 s."""
ALERTS = {
    "RLHFJobSlow": ("1", "1m"),
    "RLHFRewardCollapsed": ("10m 2h 30m 3 2h 30m 2h 30m 20", "5m"),
    "RLHFCauseFound": ("1", None),
    "RLHFKLExploded": ("0.5", "5m"),
    "RLHFUpdatesSkipped": ("15m 0 15m 0", None),
    "RLHFRolloutMismatch": ("0.02", "5m"),
    "RLHFMemoryNearLimit": ("0.95", "5m"),
    "RLHFCheckpointTooOld": ("2 1", "15m"),
    "RLHFJobRestarting": ("1h 1m 3", None),
    "RLHFQueueStuck": ("14400", "5m"),
    "RLHFJobFailed": ("1 10m 1m 1h 1", None),
    "RLHFJobUnmapped": ("1", "1h"),
    "RLHFJobUnschedulable": ("15m 1m 1 1 2h 1m 1 1 15m 1m 1", "1h"),
    "RLHFJobProvisioning": ("1", "1h"),
    "RLHFPodsDoNotEnd": ("1", "{{ add (int $.Values.trainer.gracePeriodSeconds) 900 }}s"),
    "RLHFPassesFail": ("10", "10m"),
    "RLHFKubeRayAway": ("1", "2m"),
    "RLHFOperatorNoLeader": ("1", "2m"),
}
"""Numbers of the condition in their order, and how long it must hold; docs/runbooks.md says what each is for."""


def probe(name: str) -> dict[str, Any]:
    """A probe of the operator's container."""
    text = (TEMPLATES / "deployment.yaml").read_text()
    found = re.search(rf"^( +){name}:\n((?:\1 .*\n)+)", text, re.MULTILINE)
    assert found
    document: dict[str, Any] = yaml.safe_load(found[2])
    return document


@pytest.mark.parametrize("name", SECONDS)
def test_a_probe_fails_after_so_many_seconds(name: str) -> None:
    found = probe(name)
    assert found["periodSeconds"] * found.get("failureThreshold", FAILURES) == SECONDS[name]


def rules() -> dict[str, tuple[str, str | None]]:
    """Alert -> its condition, with the thresholds of values.yaml, and how long that must hold."""
    thresholds = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["alerts"]["thresholds"]
    text = (TEMPLATES / "prometheusrule.yaml").read_text()
    text = re.sub(r"\{\{ \.thresholds\.(\w+).*?\}\}", lambda found: str(thresholds[found[1]]), text)
    found = {}
    for part in text.split("- alert: ")[1:]:
        name, _, rest = part.partition("\n")
        condition, _, after = rest.partition("labels: {severity")
        assert after
        held = re.search(r"^ +for: (.+)$", condition, re.MULTILINE)
        found[name] = condition.partition(" for: ")[0], held[1] if held else None
    return found


def test_an_alert_has_its_numbers() -> None:
    found = {name: (" ".join(NUMBER.findall(condition)), held) for name, (condition, held) in rules().items()}
    assert found == ALERTS
