"""A real Prometheus scrapes two replicas of the operator and a chain of jobs, and the dashboards have data."""

from pathlib import Path
from typing import Any

import pytest

from tests.cluster import monitoring
from tests.cluster.client import Cluster
from tests.cluster.conftest import need
from tests.cluster.prometheus import no_prometheus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def found(pods_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was seen; on this cluster the policies of jobs are enforced."""
    need(no_prometheus())
    folder: Path = tmp_path_factory.mktemp("monitoring")
    return monitoring.observe(pods_cluster, folder)


def test_targets_are_up_rules_are_evaluated_and_panels_have_data(found: dict[str, Any]) -> None:
    assert monitoring.fell_short(found) == []


def test_what_is_right_alerts_nobody_of_the_operator(found: dict[str, Any]) -> None:
    firing = {rule["name"] for rule in found["rules"] if rule["state"] == "firing"}
    assert not firing & {"RLHFOperatorNoLeader", "RLHFKubeRayAway", "RLHFRolloutMismatch", "RLHFUpdatesSkipped"}
