"""An upgrade on a real API server from the chart and CRD of the last release, with the operator and jobs running."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helm.crd.definition import definition
from tests.cluster import chart
from tests.cluster.client import Cluster
from tests.cluster.conftest import CRD
from tests.cluster.lifecycle import JOBS, SECONDS
from tests.cluster.stage import small_job, stage
from tests.helm import last_release

DEFINITION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rlhfjobs.rlhf.hybridflow.io"
OLD_FIELDS = {"nodeSelector": {"pool": "mine"}, "tolerations": [{"key": "mine", "operator": "Exists"}]}


@pytest.fixture
def server(api_server: Cluster) -> Iterator[Cluster]:
    """`api_server`, which gets back today's CRD."""
    yield api_server
    api_server.kubectl("apply", "--server-side", "--force-conflicts", "-f", CRD)


def old_versions(*, left: bool) -> list[dict[str, Any]]:
    """The last release's versions of the CRD, but for the status: the operator before the upgrade is today's, too.

    left: with the fields that left before that release, whose defaults today's operator refuses.
    """
    versions: list[dict[str, Any]] = last_release.definition(left=left)["spec"]["versions"]
    (today,) = definition()["spec"]["versions"]
    status = today["schema"]["openAPIV3Schema"]["properties"]["status"]
    versions[0]["schema"]["openAPIV3Schema"]["properties"]["status"] = status
    return versions


def with_old_fields(server: Cluster, namespace: str) -> dict[str, Any]:
    """A job with the node selector and tolerations of releases before the last one."""
    job = small_job("of-old", namespace)
    job["spec"]["runtime"] = OLD_FIELDS
    strict = f"{JOBS.format(namespace)}?dryRun=All&fieldValidation=Strict"
    server.until(lambda: server.request("POST", strict, job)[0] == 201, 30, "the server knows the old fields")
    return job


def keeps(before: object, after: object) -> bool:
    """Whether all of a part of a spec is there later; defaults of new fields may be beside it."""
    if isinstance(before, dict) and isinstance(after, dict):
        return all(name in after and keeps(part, after[name]) for name, part in before.items())
    return before == after


def test_an_upgrade_goes_on_with_jobs_and_tells_what_they_lost(server: Cluster, namespace: str, tmp_path: Path) -> None:
    own = ("--namespace", namespace, "--take-ownership")
    server.helm("upgrade", "--install", chart.RELEASE, last_release.CHART, *own, "--set", "replicaCount=0")
    server.expect("PATCH", DEFINITION, {"spec": {"versions": old_versions(left=False)}})
    with stage(server, namespace, tmp_path) as (lives, operator):
        lives.apply(small_job("runs", namespace))
        lives.train("runs")
        before = lives.jobs.get("runs")
        operator.stop()
        server.expect("PATCH", DEFINITION, {"spec": {"versions": old_versions(left=True)}})
        server.offer_volumes(1)
        server.kubectl("apply", "-f", "-", text=json.dumps(with_old_fields(server, namespace)))
        lives.apply(small_job("of-defaults", namespace))
        assert lives.jobs.get("of-defaults")["spec"]["runtime"]["tolerations"] == []
        assert lives.jobs.get("of-old")["spec"]["runtime"]["nodeSelector"] == {"pool": "mine"}
        server.helm("upgrade", chart.RELEASE, chart.CHART, *own, "--reuse-values")
        server.until(
            lambda: "nodeSelector" not in lives.jobs.get("of-old")["spec"]["runtime"], SECONDS, "the field is dropped"
        )
        assert lives.jobs.status("of-old")["observedGeneration"] == -1, (
            "kstatus takes an unseen job for one in progress"
        )
        operator.start()
        operator.wait_until_ready()
        refused = server.until(lambda: lives.jobs.condition("of-old", "Accepted"), SECONDS, "the job is judged")
        assert (refused["status"], refused["reason"]) == ("False", "SpecChangedByUpgrade")
        assert "dropped spec.runtime.nodeSelector, spec.runtime.tolerations;" in refused["message"]
        server.until(lambda: lives.jobs.condition("of-defaults", "Accepted"), SECONDS, "the defaults are judged")
        assert lives.jobs.condition("of-defaults", "Accepted")["status"] == "True"
        moved = {"worker": {"template": {"spec": OLD_FIELDS}}}
        lives.jobs.patch("of-old", {"spec": {"runtime": moved, "suspend": True}})
        lives.jobs.wait_for("of-old", "Suspended")
        lives.jobs.patch("of-old", {"spec": {"suspend": False}})
        server.until(
            lambda: lives.jobs.condition("of-old", "Accepted")["status"] == "True", SECONDS, "the edit is accepted"
        )
        after = lives.jobs.get("runs")
        assert keeps(before["spec"], after["spec"]), "an object of the last release stays as it is"
        assert (after["status"]["phase"], after["status"]["attempt"]) == ("Running", 1)
        lives.succeed("runs")
    chart.uninstall(server, namespace=namespace)
