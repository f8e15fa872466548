"""Clusters for tests: `api_server` (no pod runs) and `pods_cluster` (real pods)."""

import secrets
from collections.abc import Iterator

import pytest

from tests.cluster.build import API_GROUPS, PODS_GROUPS, NotBuiltError, built, no_go
from tests.cluster.capabilities import api_cannot_run, pods_cannot_run, required
from tests.cluster.client import Cluster
from tests.cluster.launch import cluster
from tests.cluster.network_plugin import NetworkPlugin
from tests.cluster.settings import ROOT

CRD = ROOT / "crds" / "rlhfjobs.yaml"
JOBS = "/apis/rlhf.hybridflow.io/v1alpha1/rlhfjobs"


def need(reason: str) -> None:
    """Skip for a reason, or fail where tests of the cluster are required; nothing if the reason is empty."""
    if reason and required():
        pytest.fail(reason, pytrace=False)
    if reason:
        pytest.skip(reason)


def need_programs(groups: tuple[str, ...]) -> None:
    """Skip without Go; fail if the programs could be there and are not."""
    need(no_go())
    try:
        built(groups)
    except NotBuiltError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="package")  # it ends with the last test of this folder
def api_server() -> Iterator[Cluster]:
    """Level api: the API server, controllers, scheduler and KubeRay are real; one made-up node, no kubelet."""
    need(api_cannot_run())
    need_programs(API_GROUPS)
    with cluster("api") as running:
        yield running


@pytest.fixture(scope="package")  # it ends with the last test of this folder
def rlhf_server(api_server: Cluster) -> Cluster:
    """`api_server` that knows RLHFJobs."""
    learn_rlhfjobs(api_server)
    return api_server


@pytest.fixture
def namespace(api_server: Cluster) -> Iterator[str]:
    """A namespace of its own on `api_server`, deleted afterwards."""
    yield from fresh_namespace(api_server)


@pytest.fixture(scope="package")  # it ends with the last test of this folder
def pods_cluster() -> Iterator[Cluster]:
    """Level pods: two real nodes, everything is real; what is mounted into containers says settings.mounts."""
    need(pods_cannot_run())
    need_programs(PODS_GROUPS)
    with cluster("pods", nodes=2) as running, NetworkPlugin(running):
        yield running


@pytest.fixture
def pods_namespace(pods_cluster: Cluster) -> Iterator[str]:
    """A namespace of its own on `pods_cluster`, deleted afterwards."""
    yield from fresh_namespace(pods_cluster)


def fresh_namespace(running: Cluster) -> Iterator[str]:
    """Make a namespace and have it deleted after use."""
    name = f"test-{secrets.token_hex(4)}"
    running.make_namespace(name)
    yield name
    running.drop_namespace(name)


def learn_rlhfjobs(running: Cluster) -> None:
    """Teach a cluster the RLHFJob."""
    running.kubectl("apply", "--server-side", "-f", CRD)
    # Not `kubectl wait`: it fails as long as the definition has no conditions at all.
    running.until(lambda: running.request("GET", JOBS)[0] == 200, 30, "the server knows RLHFJobs")
