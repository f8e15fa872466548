"""The chart refuses a release beside an operator that runs the same jobs; an API server is simulated."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

import pytest

from tests.cluster.processes import FailedError
from tests.helm.rendering import CHART, KUBERNETES, NAMESPACE, RELEASE, Helm, Manifest, the

RBAC = "rbac.authorization.k8s.io/v1"
KINDS = {"ClusterRole": False, "Role": True}
"""Kind -> whether its objects are in namespaces."""
REFUSED = "two operators must not run one job"
Install: TypeAlias = Callable[..., str]
"""Renders the chart beside some roles, with options of helm; None in their place: nobody may list any."""


class Answers(BaseHTTPRequestHandler):
    """Answer to what helm asks an API server that has roles only."""

    roles: Sequence[Manifest] | None = ()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        resources = [
            {"name": f"{kind.lower()}s", "singularName": "", "kind": kind, "namespaced": inside, "verbs": ["list"]}
            for kind, inside in KINDS.items()
        ]
        version = {"groupVersion": RBAC, "version": "v1"}
        known: dict[str, Any] = {
            "/version": {"major": "1", "minor": "36", "gitVersion": f"v{KUBERNETES}"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
            "/apis": {
                "kind": "APIGroupList",
                "groups": [{"name": RBAC.removesuffix("/v1"), "versions": [version], "preferredVersion": version}],
            },
            f"/apis/{RBAC}": {"kind": "APIResourceList", "groupVersion": RBAC, "resources": resources},
        }
        if path in known:
            self.answer(200, known[path])
        elif self.roles is None:
            self.answer(403, {"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403})
        else:
            kind = "ClusterRole" if path.endswith("clusterroles") else "Role"
            items = [each for each in self.roles if each["kind"] == kind]
            self.answer(200, {"kind": f"{kind}List", "apiVersion": RBAC, "metadata": {}, "items": items})

    def answer(self, status: int, document: Manifest) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def install(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"

    def rendered(roles: Sequence[Manifest] | None, *options: str) -> str:
        monkeypatch.setattr(Answers, "roles", roles)
        own = ("--namespace", NAMESPACE, "--kube-version", KUBERNETES, "--kube-apiserver", address)
        return helm.run("template", RELEASE, CHART, "--dry-run=server", *own, *options)

    yield rendered
    server.shutdown()
    server.server_close()


def role(helm: Helm, namespace: str = NAMESPACE, kind: str = "ClusterRole", **annotations: str) -> Manifest:
    """The role of an operator as Argo CD renders it in a namespace, or helm with its annotation."""
    made = the(
        helm.template({"watchNamespaces": ["team"]} if kind == "Role" else None),
        kind,
        RELEASE if kind == "Role" else f"{NAMESPACE}:{RELEASE}",
    )
    made["metadata"]["name"] = made["metadata"]["name"].replace(NAMESPACE, namespace)
    made["metadata"]["annotations"] = annotations
    return made


def of_helm(namespace: str) -> dict[str, str]:
    return {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": namespace}


def test_ones_own_upgrade_is_allowed(helm: Helm, install: Install) -> None:
    own = role(helm, **of_helm(NAMESPACE))
    assert "kind: Deployment" in install([own])
    assert "kind: Deployment" in install([role(helm)]), "taken over from Argo CD"


def test_the_chart_as_part_of_another_is_found(helm: Helm, install: Install) -> None:
    """An alias of the chart's name is in the label helm.sh/chart."""
    other = role(helm, "elsewhere", **of_helm("elsewhere"))
    other["metadata"]["labels"] |= {"helm.sh/chart": "alias-0.2.0", "app.kubernetes.io/instance": "parent"}
    with pytest.raises(FailedError, match=f"the release parent of namespace elsewhere .*{REFUSED}"):
        install([other])


def test_a_release_of_the_same_name_by_argo_cd_is_found(helm: Helm, install: Install) -> None:
    with pytest.raises(FailedError, match=f"namespace elsewhere runs the jobs of all namespaces .*{REFUSED}"):
        install([role(helm, "elsewhere")])
    with pytest.raises(FailedError, match=f"unknown.* runs the jobs of namespace team .*{REFUSED}"):
        install([role(helm, kind="Role")], "--set", "watchNamespaces={team}")


def test_a_role_of_people_is_no_operator(helm: Helm, install: Install) -> None:
    view = role(helm, "elsewhere")
    view["metadata"]["name"], view["aggregationRule"] = "view", {"clusterRoleSelectors": []}
    assert "kind: Deployment" in install([view])


def test_who_may_not_list_roles_switches_the_look_off(install: Install) -> None:
    with pytest.raises(FailedError, match="error calling lookup"):
        install(None, "--set", "watchNamespaces={team}")
    assert "kind: Role" in install(None, "--set", "watchNamespaces={team}", "--set", "rbac.lookForOthers=false")
