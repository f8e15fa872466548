"""A real API server takes what the chart renders, and lets the operator do what its roles say, no more."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import chart
from tests.cluster.client import Cluster
from tests.cluster.processes import output_of
from tests.cluster.settings import free_ports
from tests.helm.rendering import Helm, Manifest, Values, the
from tests.helm.test_the_chart_renders_what_its_values_say import ALL_ON, NAMESPACED
from tests.helm.test_the_operator_gets_no_more_rights_than_it_uses import LEASES, NEEDED, NODES

REVIEW = "/apis/authorization.k8s.io/v1/{}"
UNKNOWN_HERE = {"PodMonitor", "ServiceMonitor", "PrometheusRule"}
"""Kinds of the Prometheus operator, which the test cluster has not."""
FORBIDDEN = {
    "read a secret": ("", "secrets", "get"),
    "list secrets": ("", "secrets", "list"),
    "change a pod": ("", "pods", "patch"),
    "delete a Job": ("batch", "jobs", "delete"),
    "change a RayJob": ("ray.io", "rayjobs", "patch"),
    "change a job": ("rlhf.hybridflow.io", "rlhfjobs", "patch"),
    "delete a claim": ("", "persistentvolumeclaims", "delete"),
    "change a deployment": ("apps", "deployments", "update"),
    "give itself rights": ("rbac.authorization.k8s.io", "rolebindings", "create"),
    "delete a node": ("", "nodes", "delete"),
    "run a command in a pod": ("", "pods/exec", "create"),
}


@pytest.fixture(scope="module")
def helm(api_server: Cluster) -> Helm:
    """Helm as the cluster has it."""
    return Helm(api_server.programs / "helm", api_server.folder / "helm-alone")


@pytest.fixture(scope="module")
def release(api_server: Cluster) -> Iterator[str]:
    """Namespace of a release for all namespaces, without pods: there is no kubelet here."""
    namespace = "chart-test"
    chart.helm_upgrade(api_server, namespace, "--set", "replicaCount=0")
    yield namespace
    chart.uninstall(api_server, namespace=namespace)
    api_server.drop_namespace(namespace)


def rules(server: Cluster, namespace: str, account_in: str) -> dict[tuple[str, str], set[str]]:
    """What the server says that the operator may do in a namespace, but for what every account may."""
    token = server.token(account_in, chart.RELEASE)
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    status, answer = server.request("POST", REVIEW.format("selfsubjectrulesreviews"), review, token=token)
    assert status == 201, answer
    found: dict[tuple[str, str], set[str]] = {}
    for rule in answer["status"]["resourceRules"]:
        for key in ((group, resource) for group in rule["apiGroups"] for resource in rule["resources"]):
            found.setdefault(key, set()).update(rule["verbs"])
    return {key: verbs for key, verbs in found.items() if not key[1].startswith("selfsubject")}


def may(server: Cluster, account_in: str, namespace: str, group: str, resource: str, verb: str) -> bool:
    """What `kubectl auth can-i --as` asks: whether the operator may do something in a namespace."""
    plural, _, subresource = resource.partition("/")
    attributes = {"namespace": namespace, "group": group, "resource": plural, "verb": verb, "subresource": subresource}
    spec = {"user": f"system:serviceaccount:{account_in}:{chart.RELEASE}", "resourceAttributes": attributes}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    return bool(server.expect("POST", REVIEW.format("subjectaccessreviews"), body)["status"]["allowed"])


@contextmanager
def operator(server: Cluster, account_in: str, folder: Path) -> Iterator[str]:
    """The operator as a process of this machine, with the release's settings and rights: address of its port."""
    maps = f"/api/v1/namespaces/{account_in}/configmaps/{chart.RELEASE}"
    config, log = folder / "config.yaml", folder / "operator.log"
    config.write_text(server.expect("GET", maps)["data"]["config.yaml"])
    kubeconfig = server.kubeconfig(server.token(account_in, chart.RELEASE))
    port, probes_port = free_ports(2)
    program = Path(sys.executable).with_name("rlhf-operator")  # as in its image
    command = [program, "--config", config, "--kubeconfig", kubeconfig, "--port", port, "--probes-port", probes_port]
    with log.open("wb") as sink:
        process = subprocess.Popen([str(word) for word in command], stdout=sink, stderr=sink)
    try:
        address = f"http://127.0.0.1:{port}"
        ready = f"http://127.0.0.1:{probes_port}/readyz"
        server.until(lambda: process.poll() is not None or answers(ready), 60, "the operator is ready")
        assert process.poll() is None, log.read_text()
        said = output_of(sys.executable, "-m", "rlhf_operator.ready", ready)  # as the pod of `helm test` does
        assert said == f"{ready}: ok\n"
        yield address
        process.terminate()
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> str:
    """What is at an address; empty while there is nothing."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def of_this_namespace(manifests: list[Manifest], namespace: str) -> list[Manifest]:
    """Manifests with a namespace that exists, without kinds that the server cannot know."""
    for manifest in manifests:
        if "namespace" in manifest["metadata"]:
            manifest["metadata"]["namespace"] = namespace
    return [manifest for manifest in manifests if manifest["kind"] not in UNKNOWN_HERE]


@pytest.mark.parametrize("values", [{}, ALL_ON, NAMESPACED], ids=["defaults", "all on", "namespaced"])
def test_the_server_takes_every_object(api_server: Cluster, namespace: str, helm: Helm, values: Values) -> None:
    manifests = of_this_namespace(helm.template(values), namespace)
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    api_server.expect("POST", accounts, the(manifests, "ServiceAccount"))  # a pod is refused without it, tried or not
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    said = api_server.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", text=text)
    assert said.count("server dry run") == len(manifests)


def test_the_charts_pods_are_let_into_a_restricted_namespace(api_server: Cluster, namespace: str, helm: Helm) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api_server.expect("PATCH", f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": labels}})
    manifests = of_this_namespace(helm.template(), namespace)
    api_server.expect("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", the(manifests, "ServiceAccount"))
    template = the(manifests, "Deployment")["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    pod["metadata"] = {**template["metadata"], "name": "operator"}
    path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"
    for let_in in (pod, the(manifests, "Pod")):
        api_server.expect("POST", path, let_in)
    pod["spec"]["containers"][0]["securityContext"] = {}
    status, answer = api_server.request("POST", path, pod)
    assert status == 403, "the namespace is not restricted"
    assert "violates PodSecurity" in answer["message"]


def test_the_notes_say_what_is_run_and_that_kuberay_is_there(api_server: Cluster, release: str) -> None:
    notes = api_server.helm("get", "notes", chart.RELEASE, "--namespace", release)
    assert "it runs the jobs of all namespaces" in notes
    assert f"\n  helm test {chart.RELEASE} --namespace {release}\n" in notes
    assert "WARNING" not in notes


@pytest.mark.parametrize("somewhere", ["default", "kube-system"])
def test_a_cluster_wide_operator_may_do_its_work_and_no_more(api_server: Cluster, release: str, somewhere: str) -> None:
    assert rules(api_server, somewhere, release) == {**NEEDED, **NODES}
    assert rules(api_server, release, release) == {**NEEDED, **NODES, **LEASES}


def test_the_operator_starts_with_these_rights(api_server: Cluster, release: str, tmp_path: Path) -> None:
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{release}/leases/{chart.RELEASE}"
    with operator(api_server, release, tmp_path) as address:
        api_server.until(lambda: api_server.request("GET", leases)[0] == 200, 30, "the operator leads")
        assert 'code="403"' not in answers(f"{address}/metrics")
    assert '"status": 403' not in (tmp_path / "operator.log").read_text()


@pytest.mark.parametrize(("group", "resource", "verb"), FORBIDDEN.values(), ids=FORBIDDEN)
def test_the_operator_cannot(api_server: Cluster, release: str, group: str, resource: str, verb: str) -> None:
    assert may(api_server, release, release, "ray.io", "rayjobs", "create")
    assert not may(api_server, release, release, group, resource, verb)


def test_kubectl_says_so_too(api_server: Cluster, release: str) -> None:
    account = f"--as=system:serviceaccount:{release}:{chart.RELEASE}"
    assert api_server.kubectl("auth", "can-i", "create", "rayjobs.ray.io", account).strip() == "yes"
    kubectl = [api_server.programs / "kubectl", "auth", "can-i", "get", "secrets", account]
    assert output_of("sh", "-c", '"$@" || true', "sh", *kubectl, environment=api_server.environment()).strip() == "no"


def test_a_user_with_the_role_view_sees_jobs(api_server: Cluster, namespace: str, release: str) -> None:
    assert release
    api_server.kubectl("create", "rolebinding", "viewer", "--clusterrole=view", "--user=eve", "-n", namespace)

    def eve(verb: str) -> bool:
        attributes = {"namespace": namespace, "group": "rlhf.hybridflow.io", "resource": "rlhfjobs", "verb": verb}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
        spec = {"user": "eve", "resourceAttributes": attributes}
        path = REVIEW.format("subjectaccessreviews")
        return bool(api_server.expect("POST", path, {**body, "spec": spec})["status"]["allowed"])

    api_server.until(lambda: eve("list"), 20, "the role view takes the chart's in")
    assert not eve("create")


def test_an_uninstalled_chart_leaves_the_crd_and_no_lease(api_server: Cluster, release: str) -> None:
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{release}/leases"
    api_server.request("POST", leases, {"metadata": {"name": chart.RELEASE}, "spec": {}})  # unless an operator has led
    assert api_server.request("GET", f"{leases}/{chart.RELEASE}")[0] == 200
    chart.uninstall(api_server, namespace=release)
    assert not api_server.items(leases)
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rlhfjobs.rlhf.hybridflow.io"
    kept = api_server.expect("GET", path)["metadata"]["annotations"]
    assert kept["helm.sh/resource-policy"] == "keep"
