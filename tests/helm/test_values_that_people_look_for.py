"""What most charts have: more of a pod, security contexts, TLS, monitors, authorities, `helm test`, a parent chart."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_operator.server import OPERATOR_METRICS_PORT, PROBES_PORT
from tests.each import each_case
from tests.helm.rendering import CHART, NAMESPACE, RELEASE, Helm, Manifest, Values, the

SERVER = f"{RELEASE}-metrics.{NAMESPACE}.svc"
CA = {"secret": {"name": "metrics-tls", "key": "ca.crt"}}
TLS: Values = {"metrics": {"tls": {"secretName": "metrics-tls"}}}
CERTIFICATE = {"cert": {"secret": {"name": "prometheus", "key": "tls.crt"}}}


def pod(helm: Helm, values: Values) -> dict[str, Any]:
    """The spec of the operator's pod."""
    return dict(the(helm.template(values), "Deployment")["spec"]["template"]["spec"])


def arguments(helm: Helm, values: Values) -> list[str]:
    """Of the operator."""
    return list(pod(helm, values)["containers"][0]["args"])


def mounted(spec: dict[str, Any], folder: str) -> dict[str, Any] | None:
    """The volume that a pod's first container has in a folder."""
    names = [each["name"] for each in spec["containers"][0]["volumeMounts"] if each["mountPath"] == folder]
    return next((volume for volume in spec["volumes"] if volume["name"] in names), None)


def test_a_security_context_is_changed_field_by_field(helm: Helm) -> None:
    anybody = {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}}
    changed = pod(helm, {**anybody, "securityContext": {"readOnlyRootFilesystem": False}})
    assert changed["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    context = changed["containers"][0]["securityContext"]
    assert context == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_log_is_as_it_is_asked_for(helm: Helm) -> None:
    assert {"--log-level=info", "--log-format=json"} <= set(arguments(helm, {}))
    asked = {"logging": {"level": "debug", "format": "text"}}
    assert {"--log-level=debug", "--log-format=text"} <= set(arguments(helm, asked))


def test_tls_of_metrics_is_a_secret_in_the_pod_and_a_flag(helm: Helm) -> None:
    assert not [each for each in arguments(helm, {}) if "tls" in each]
    spec = pod(helm, TLS)
    (flag,) = [each for each in arguments(helm, TLS) if each.startswith("--tls=")]
    found = mounted(spec, flag.removeprefix("--tls="))
    assert found is not None
    assert found["secret"] == {"secretName": "metrics-tls"}
    asking = {"metrics": {"tls": {"secretName": "metrics-tls", "requireClientCertificate": True}}}
    assert set(arguments(helm, asking)) - set(arguments(helm, TLS)) == {"--require-client-certificate"}
    complaint = helm.complaint({"metrics": {"tls": {"requireClientCertificate": True}}})
    assert "metrics.tls.requireClientCertificate needs metrics.tls.secretName" in complaint


@pytest.mark.parametrize("values", [{}, TLS], ids=["plain", "tls"])
def test_probes_and_service_use_the_operators_ports(helm: Helm, values: Values) -> None:
    (operator,) = pod(helm, values)["containers"]
    assert {each["name"]: each["containerPort"] for each in operator["ports"]} == {
        "metrics": OPERATOR_METRICS_PORT,
        "probes": PROBES_PORT,
    }
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = operator[probe]["httpGet"]
        assert asked["port"] == "probes"
        assert asked.get("scheme", "HTTP") == "HTTP"
    ports = the(helm.template(values), "Service")["spec"]["ports"]
    assert {each["targetPort"]: each["port"] for each in ports} == {
        "metrics": OPERATOR_METRICS_PORT,
        "probes": PROBES_PORT,
    }


def endpoints(manifests: list[Manifest]) -> dict[tuple[str, str], dict[str, Any]]:
    """(kind, name) of each monitor -> its only endpoint."""
    found = {}
    for each in manifests:
        if each["kind"] in ("PodMonitor", "ServiceMonitor"):
            spec = each["spec"]
            (endpoint,) = spec["endpoints" if each["kind"] == "ServiceMonitor" else "podMetricsEndpoints"]
            found[each["kind"], each["metadata"]["name"]] = endpoint
    return found


@each_case(
    ("of_pods", "of_service", "operator"),
    [(False, False, ""), (True, False, "PodMonitor"), (False, True, "ServiceMonitor"), (True, True, "ServiceMonitor")],
)
def test_the_operator_is_scraped_once_and_jobs_by_their_pods(
    helm: Helm, of_pods: bool, of_service: bool, operator: str
) -> None:
    values = {"podMonitor": {"enabled": of_pods}, "serviceMonitor": {"enabled": of_service}}
    expected = {(operator, RELEASE), ("PodMonitor", f"{RELEASE}-jobs")} if operator else set()
    assert set(endpoints(helm.template(values))) == expected


@pytest.mark.parametrize("kind", ["podMonitor", "serviceMonitor"])
def test_monitors_keep_the_labels_of_jobs(helm: Helm, kind: str) -> None:
    """`namespace` and `job` of a series are of the job that it is about, as with kube-state-metrics."""
    values = {kind: {"enabled": True, "interval": "7s", "additionalLabels": {"release": "x"}}}
    manifests = helm.template(values)
    found = endpoints(manifests)
    assert len(found) == 2
    assert all(each["honorLabels"] is True and each["interval"] == "7s" for each in found.values())
    monitors = [each for each in manifests if each["kind"].endswith("Monitor")]
    assert all(each["metadata"]["labels"]["release"] == "x" for each in monitors)


@pytest.mark.parametrize("kind", ["podMonitor", "serviceMonitor"])
def test_a_monitor_knows_whom_to_trust(helm: Helm, kind: str) -> None:
    def operator(values: Values) -> dict[str, Any]:
        found = endpoints(helm.template({kind: {"enabled": True}, **values}))
        assert "scheme" not in found["PodMonitor", f"{RELEASE}-jobs"], "the trainer's metrics are in plain text"
        return next(each for (_, name), each in found.items() if name == RELEASE)

    assert not {"scheme", "tlsConfig"} & operator({}).keys()
    secured = operator(TLS)
    assert (secured["scheme"], secured["tlsConfig"]) == ("https", {"ca": CA, "serverName": SERVER})
    own = {**CERTIFICATE, "ca": {"configMap": {"name": "authorities", "key": "all.pem"}}}
    found = operator({"metrics": {"tls": {"secretName": "metrics-tls", "monitor": own}}})
    assert found["tlsConfig"] == {"serverName": SERVER, **own}


def test_a_service_monitor_needs_the_service(helm: Helm) -> None:
    complaint = helm.complaint({"serviceMonitor": {"enabled": True}, "metrics": {"service": False}})
    assert "serviceMonitor.enabled needs metrics.service" in complaint


def test_authorities_of_a_config_map_are_trusted_by_the_operator(helm: Helm) -> None:
    def variables(spec: dict[str, Any]) -> dict[str, str]:
        return {each["name"]: each.get("value", "") for each in spec["containers"][0]["env"]}

    assert not {"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"} & variables(pod(helm, {})).keys()
    spec = pod(helm, {"caBundle": {"configMap": "authorities", "key": "all.pem"}})
    file = Path(variables(spec)["SSL_CERT_FILE"])
    assert variables(spec)["REQUESTS_CA_BUNDLE"] == str(file)
    found = mounted(spec, str(file.parent))
    assert found is not None
    assert found["configMap"] == {"name": "authorities", "items": [{"key": "all.pem", "path": file.name}]}


def test_text_in_objects_of_the_user_is_a_template(helm: Helm) -> None:
    name = '{{ include "rlhf-operator.fullname" . }}-more'
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"a": "{{ .Release.Name }}"}}
    found = the(helm.template({"extraObjects": [made, {**made, "kind": "Secret"}]}), "ConfigMap", f"{RELEASE}-more")
    assert found["data"] == {"a": RELEASE}


def test_helm_test_runs_a_pod_that_is_none_of_the_operators(helm: Helm) -> None:
    values = {"imagePullSecrets": [{"name": "a"}], "nodeSelector": {"b": "c"}, "tolerations": [{"operator": "Exists"}]}
    manifests = helm.template(values)
    test = the(manifests, "Pod")
    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"
    selector = the(manifests, "Service")["spec"]["selector"]
    assert not selector.items() <= test["metadata"]["labels"].items()
    operator = the(manifests, "Deployment")["spec"]["template"]["spec"]
    shared = ("securityContext", "serviceAccountName", "imagePullSecrets", "nodeSelector", "tolerations")
    assert {name: test["spec"][name] for name in shared} == {name: operator[name] for name in shared}
    (container,) = test["spec"]["containers"]
    for name in ("image", "imagePullPolicy", "securityContext"):
        assert container[name] == operator["containers"][0][name]
    assert container["args"][-1] == f"http://{RELEASE}-metrics:{PROBES_PORT}/readyz"
    assert "Pod" not in {each["kind"] for each in helm.template({"metrics": {"service": False}})}


def parent(folder: Path, values: Values) -> Path:
    """A chart that contains this one as `operator`, on a condition."""
    (folder / "charts").mkdir()
    (folder / "charts" / "rlhf-operator").symlink_to(CHART)
    dependency = {"name": "rlhf-operator", "alias": "operator", "version": "*", "condition": "operator.enabled"}
    chart = {"apiVersion": "v2", "name": "parent", "version": "1.0.0", "dependencies": [dependency]}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(chart))
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    return folder


@pytest.mark.parametrize("enabled", [True, False])
def test_a_parent_chart_turns_it_on_and_off(helm: Helm, tmp_path: Path, enabled: bool) -> None:
    values = {"global": {"imageRegistry": "x"}, "operator": {"enabled": enabled, "replicaCount": 2}}
    text = helm.run("template", "platform", parent(tmp_path, values), "--kube-version", "1.36.1", "-n", NAMESPACE)
    found = [document for document in yaml.safe_load_all(text) if document]
    assert bool(found) is enabled
    if enabled:
        assert the(found, "Deployment")["spec"]["replicas"] == 2
