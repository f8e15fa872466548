"""What the cluster offers, where the API server answers badly."""

from pathlib import Path

import pytest

from rlhf_operator.cluster.client import ApiError, NoClusterError
from rlhf_operator.cluster.discovery import discover
from rlhf_operator.cluster.resources import OURS
from rlhf_operator.settings import Settings
from tests.operator.test_writes_to_a_failing_server import Parts, run

JOBS = "/apis/rlhf.hybridflow.io/v1alpha1"
SETTINGS = Settings(read_nodes=False)


def test_a_server_that_is_busy_does_not_offer_less(tmp_path: Path, pauses: list[float]) -> None:
    async def test(parts: Parts) -> None:
        for _ in range(5):
            parts.server.will("GET", JOBS, 200, {"resources": [{"name": "rlhfjobs"}]})
            parts.server.will("GET", "/apis/ray.io/v1", 503)
        with pytest.raises(ApiError) as failed:
            await discover(parts.client, SETTINGS)
        assert (failed.value.status, failed.value.passing) == (503, True)
        assert len(pauses) == 4

    run(tmp_path, test)


def test_what_is_not_installed_is_not_offered(tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        parts.server.will("GET", JOBS, 200, {"resources": [{"name": "rlhfjobs"}]})
        parts.server.will("GET", "/apis/ray.io/v1", 404)
        parts.server.will("GET", "/apis/kueue.x-k8s.io", 404)
        offer = await discover(parts.client, SETTINGS)
        assert not offer.capabilities
        assert [kind.name for kind in offer.kinds] == ["jobs", "claims", "pods"]

    run(tmp_path, test)


@pytest.mark.parametrize(("status", "selector"), [(200, ""), (403, OURS)])
def test_pods_of_others_are_watched_where_nodes_may_be_read(
    status: int, selector: str, tmp_path: Path, pauses: list[float]
) -> None:
    async def test(parts: Parts) -> None:
        parts.server.will("GET", JOBS, 200, {"resources": [{"name": "rlhfjobs"}]})
        parts.server.will("GET", "/apis/ray.io/v1", 404)
        parts.server.will("GET", "/apis/kueue.x-k8s.io", 404)
        parts.server.will("GET", "/api/v1/nodes", status, {"items": []})
        offer = await discover(parts.client, Settings())
        (pods,) = (kind for kind in offer.kinds if kind.name == "pods")
        assert pods.selector == selector
        assert ("priorities" in {kind.name for kind in offer.kinds}) == (status == 200)
        assert not pauses

    run(tmp_path, test)


@pytest.mark.parametrize("version", ["v1", "v1beta1", None])
def test_slices_are_watched_in_the_servers_version(version: str | None, tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        parts.server.will("GET", JOBS, 200, {"resources": [{"name": "rlhfjobs"}]})
        if version:
            parts.server.will("GET", "/apis/resource.k8s.io", 200, {"preferredVersion": {"version": version}})
            of_version = f"/apis/resource.k8s.io/{version}"
            parts.server.will("GET", of_version, 200, {"resources": [{"name": "resourceslices"}]})
        offer = await discover(parts.client, Settings())
        assert [kind.resource.version for kind in offer.kinds if kind.name == "slices"] == [version] * bool(version)

    run(tmp_path, test)


def test_a_cluster_without_our_jobs_says_what_to_install(tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        parts.server.will("GET", JOBS, 404)
        with pytest.raises(NoClusterError, match=r"crds\.enabled=true"):
            await discover(parts.client, SETTINGS)

    run(tmp_path, test)
