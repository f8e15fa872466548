"""A release for some namespaces only, and a second one beside another, installed by helm on a real API server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import chart
from tests.cluster.api.test_chart import answers, operator, rules
from tests.cluster.client import Cluster
from tests.cluster.conftest import fresh_namespace
from tests.cluster.processes import FailedError
from tests.helm.test_the_operator_gets_no_more_rights_than_it_uses import LEASES, NEEDED

BARE = ("--skip-crds", "--set", "crds.enabled=false,replicaCount=0,rbac.aggregate=false")
"""Without pods, as there is no kubelet here, and without a CRD, which only one release may own."""


def install(server: Cluster, namespace: str, *watched: str, name: str = chart.RELEASE, more: str = "") -> None:
    """Install a release for some namespaces, or for all; FailedError if helm refuses."""
    words = [*BARE, "--set", f"watchNamespaces={{{','.join(watched)}}}"] if watched else list(BARE)
    own = ["--namespace", namespace, *words, *(["--set", more] if more else [])]
    server.helm("upgrade", "--install", name, chart.CHART, *own)


@pytest.fixture(scope="module")
def namespaces(rlhf_server: Cluster) -> Iterator[tuple[str, str]]:
    """Two namespaces, from which every release is taken away afterwards."""
    for one in fresh_namespace(rlhf_server):
        for two in fresh_namespace(rlhf_server):
            yield one, two


@pytest.fixture
def narrow(rlhf_server: Cluster, namespaces: tuple[str, str]) -> Iterator[str]:
    """The namespace of a release that runs the jobs of this namespace only."""
    one, _ = namespaces
    install(rlhf_server, one, one)
    yield one
    chart.uninstall(rlhf_server, namespace=one)


@pytest.fixture
def wide(rlhf_server: Cluster, namespaces: tuple[str, str]) -> Iterator[str]:
    """The namespace of a release that runs the jobs of all namespaces."""
    one, _ = namespaces
    install(rlhf_server, one)
    yield one
    chart.uninstall(rlhf_server, namespace=one)


def test_a_namespaced_operator_may_do_nothing_elsewhere(rlhf_server: Cluster, narrow: str) -> None:
    assert rules(rlhf_server, narrow, narrow) == {**NEEDED, **LEASES}
    assert rules(rlhf_server, "default", narrow) == {}


def test_a_namespaced_operator_starts_with_these_rights(rlhf_server: Cluster, narrow: str, tmp_path: Path) -> None:
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{narrow}/leases/{chart.RELEASE}"
    with operator(rlhf_server, narrow, tmp_path) as address:
        rlhf_server.until(lambda: rlhf_server.request("GET", leases)[0] == 200, 30, "the operator leads")
        assert 'code="403"' not in answers(f"{address}/metrics")
    assert '"status": 403' not in (tmp_path / "operator.log").read_text()


def test_releases_with_namespaces_of_their_own_are_allowed(
    rlhf_server: Cluster, narrow: str, namespaces: tuple[str, str]
) -> None:
    _, two = namespaces
    install(rlhf_server, two, two)
    install(rlhf_server, narrow, narrow, more="logging.level=debug")  # an upgrade does not stumble over itself
    chart.uninstall(rlhf_server, namespace=two)


@pytest.mark.parametrize("name", [chart.RELEASE, "second"])
def test_a_release_for_a_namespace_that_another_has_is_refused(
    rlhf_server: Cluster, narrow: str, namespaces: tuple[str, str], name: str
) -> None:
    _, two = namespaces
    told = f"the release {chart.RELEASE} of namespace {narrow} runs the jobs of namespace {narrow} already"
    for watched in ([two, narrow], []):
        with pytest.raises(FailedError, match=told):
            install(rlhf_server, two, *watched, name=name)


@pytest.mark.parametrize("is_narrow", [True, False], ids=["one namespace", "all namespaces"])
def test_nothing_is_installed_beside_a_release_for_all(
    rlhf_server: Cluster, wide: str, namespaces: tuple[str, str], is_narrow: bool
) -> None:
    _, two = namespaces
    told = f"the release {chart.RELEASE} of namespace {wide} runs the jobs of all namespaces already"
    with pytest.raises(FailedError, match=told):
        install(rlhf_server, two, *([two] if is_narrow else []))
    install(rlhf_server, wide, more="logging.level=debug")
