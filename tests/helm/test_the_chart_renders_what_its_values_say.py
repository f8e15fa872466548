"""Each value of the chart does what it says, and what is off is not there."""

from importlib.metadata import version
from typing import Any

import pytest
import yaml

from rlhf_operator import names
from rlhf_operator.resources import attempt
from tests.each import each_case
from tests.helm.rendering import CHART, NAMESPACE, RELEASE, Helm, Values, the
from tests.repo.tree import ROOT

ALL_ON: Values = {
    "replicaCount": 2,
    "commonLabels": {"team": "a"},
    "imagePullSecrets": [{"name": "registry"}],
    "podMonitor": {"enabled": True, "additionalLabels": {"release": "prometheus"}},
    "monitoring": {
        "alerts": {"enabled": True, "additionalLabels": {"release": "prometheus"}},
        "dashboards": {"enabled": True},
    },
    "serviceMonitor": {"enabled": True, "additionalLabels": {"release": "prometheus"}},
    "metrics": {"tls": {"secretName": "metrics-tls", "requireClientCertificate": True}},
    "caBundle": {"configMap": "authorities", "key": "all.pem"},
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "extraArgs": ["--log-level=debug"],
    "extraObjects": [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "{{ .Release.Name }}-more"},
            "data": {"chart": "{{ .Chart.Name }}"},
        }
    ],
    "networkPolicy": {"enabled": True},
    "serviceAccount": {"annotations": {"a": "b"}},
    "podAnnotations": {"c": "d"},
    "podLabels": {"e": "f"},
    "nodeSelector": {"g": "h"},
    "tolerations": [{"key": "i", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    ],
    "priorityClassName": "system-cluster-critical",
}
NAMESPACED: Values = {"watchNamespaces": ["team-a", "team-b"]}
BARE: Values = {
    "crds": {"enabled": False},
    "rbac": {"create": False},
    "serviceAccount": {"create": False, "name": "mine"},
    "metrics": {"service": False},
    "leaderElection": {"enabled": False},
}
CASES = {"defaults": {}, "all on": ALL_ON, "namespaced": NAMESPACED, "bare": BARE}


def kinds(helm: Helm, values: Values) -> list[str]:
    """The kinds of what is rendered, in alphabetical order."""
    return sorted(each["kind"] for each in helm.template(values))


def container(helm: Helm, values: Values) -> dict[str, Any]:
    """The operator's container."""
    (only,) = the(helm.template(values), "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(only)


@each_case("values", CASES.values(), ids=CASES)
def test_helm_finds_no_fault(helm: Helm, values: Values) -> None:
    assert "0 chart(s) failed" in helm.lint(values)


def test_the_defaults_install_one_operator_for_all_namespaces(helm: Helm) -> None:
    assert kinds(helm, {}) == [
        *["ClusterRole"] * 3,
        "ClusterRoleBinding",
        "ConfigMap",
        "CustomResourceDefinition",
        "Deployment",
        "Lease",
        "Pod",
        "Role",
        "RoleBinding",
        "Service",
        "ServiceAccount",
    ]


def test_what_is_off_is_not_there(helm: Helm) -> None:
    assert kinds(helm, BARE) == ["ConfigMap", "Deployment"]


def test_what_is_on_is_there(helm: Helm) -> None:
    added = set(kinds(helm, ALL_ON)) - set(kinds(helm, {}))
    assert added == {"PodMonitor", "ServiceMonitor", "PrometheusRule", "NetworkPolicy", "PodDisruptionBudget"}


def test_a_single_replica_has_no_disruption_budget(helm: Helm) -> None:
    assert "PodDisruptionBudget" not in kinds(helm, {"podDisruptionBudget": {"enabled": True}})


@each_case("values", CASES.values(), ids=CASES)
def test_everything_says_to_which_release_it_belongs(helm: Helm, values: Values) -> None:
    for manifest in helm.template({**values, "extraObjects": []}):
        labels = manifest["metadata"]["labels"]
        expected = {"app.kubernetes.io/instance": RELEASE, **values.get("commonLabels", {})}
        assert expected.items() <= labels.items(), manifest["metadata"]["name"]


def test_all_that_a_user_gives_reaches_the_pod(helm: Helm) -> None:
    template = the(helm.template(ALL_ON), "Deployment")["spec"]["template"]
    assert {"c": "d"}.items() <= template["metadata"]["annotations"].items()
    assert {"e": "f"}.items() <= template["metadata"]["labels"].items()
    copied = ("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints", "priorityClassName")
    assert {name: template["spec"][name] for name in copied} == {name: ALL_ON[name] for name in copied}
    assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    (operator,) = template["spec"]["containers"]
    assert operator["env"][-1] == {"name": "A", "value": "b"}
    assert operator["args"][-1] == "--log-level=debug"
    assert operator["volumeMounts"][-1] == {"name": "more", "mountPath": "/more"}
    assert template["spec"]["volumes"][-1] == {"name": "more", "emptyDir": {}}


def test_a_label_stands_once(helm: Helm) -> None:
    part_of = "app.kubernetes.io/part-of"  # the CRD of the repository has it
    values = {"commonLabels": {part_of: "ml", "team": "a"}, "podLabels": {"team": "b"}}
    manifests = helm.template(values)
    assert the(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]["team"] == "b"
    assert the(manifests, "Deployment")["metadata"]["labels"]["team"] == "a"
    assert the(manifests, "CustomResourceDefinition")["metadata"]["labels"][part_of] == "ml"


def test_the_pod_meets_the_restricted_standard(helm: Helm) -> None:
    pod = the(helm.template(), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (operator,) = pod["containers"]
    assert operator["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]


def test_the_token_is_in_the_operators_pod_only(helm: Helm) -> None:
    manifests = helm.template()
    assert the(manifests, "ServiceAccount")["automountServiceAccountToken"] is False
    assert the(manifests, "Deployment")["spec"]["template"]["spec"]["automountServiceAccountToken"] is True


def test_the_pod_starts_anew_only_when_its_settings_change(helm: Helm) -> None:
    def checksum(values: Values) -> str:
        metadata = the(helm.template(values), "Deployment")["spec"]["template"]["metadata"]
        return str(metadata["annotations"]["checksum/config"])

    assert checksum({}) != checksum({"trainer": {"sharedMemory": "1Gi"}})
    assert checksum({}) == checksum({"metrics": {"service": False}})


@each_case(
    ("image", "expected"),
    [
        ({}, f"rlhf-operator:{version('rlhf-operator')}"),
        ({"repository": "a/b", "tag": "c"}, "a/b:c"),
        ({"registry": "r.example:5000/x", "tag": "c"}, "r.example:5000/x/rlhf-operator:c"),
        ({"repository": "a/b", "tag": "c", "digest": "sha256:" + "0" * 64}, "a/b@sha256:" + "0" * 64),
    ],
)
def test_the_image_is_named_by_tag_or_digest(helm: Helm, image: Values, expected: str) -> None:
    assert container(helm, {"image": image})["image"] == expected


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({}, f"r.example/x/rlhf-trainer:{version('rlhf-operator')}"),
        ({"image": "other.example/a:b"}, "other.example/a:b"),
    ],
    ids=["default", "named"],
)
def test_one_registry_is_that_of_both_images(helm: Helm, trainer: Values, expected: str) -> None:
    manifests = helm.template({"image": {"registry": "r.example/x"}, "trainer": trainer})
    config = yaml.safe_load(the(manifests, "ConfigMap")["data"]["config.yaml"])
    assert config["trainerImage"] == expected
    assert the(manifests, "Pod")["spec"]["containers"][0]["image"].startswith("r.example/x/rlhf-operator:")


def test_few_old_replica_sets_are_kept(helm: Helm) -> None:
    assert the(helm.template(), "Deployment")["spec"]["revisionHistoryLimit"] == 3


def test_every_hook_is_deleted_once_it_has_done_its_work(helm: Helm) -> None:
    notes = [each["metadata"].get("annotations", {}) for each in helm.template(ALL_ON)]
    policies = [each["helm.sh/hook-delete-policy"] for each in notes if "helm.sh/hook" in each]
    assert policies == ["before-hook-creation,hook-succeeded"] * 2


def test_two_operators_never_run_without_an_election(helm: Helm) -> None:
    assert the(helm.template(), "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    complaint = helm.complaint({"replicaCount": 2, "leaderElection": {"enabled": False}})
    assert "replicaCount above 1 needs leaderElection.enabled" in complaint


def test_a_service_account_that_is_not_made_has_a_name(helm: Helm) -> None:
    assert "serviceAccount.name is needed" in helm.complaint({"serviceAccount": {"create": False}})


def test_selectors_find_the_operators_pod_and_those_of_jobs(helm: Helm) -> None:
    manifests = helm.template(ALL_ON)
    labels = the(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    own = [
        the(manifests, "Deployment")["spec"]["selector"]["matchLabels"],
        the(manifests, "Service")["spec"]["selector"],
        the(manifests, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        the(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        the(manifests, "ServiceMonitor")["spec"]["selector"]["matchLabels"],
        the(helm.template({"podMonitor": {"enabled": True}}), "PodMonitor", RELEASE)["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels for selector in own)
    jobs = the(manifests, "PodMonitor", f"{RELEASE}-jobs")["spec"]
    assert jobs["selector"]["matchLabels"] == {names.ROLE: names.CONTROLLER}
    assert jobs["podTargetLabels"] == [names.JOB_NAME, names.ATTEMPT]
    assert attempt.LOG_PORTS[jobs["podMetricsEndpoints"][0]["port"]] == names.TRAINER_METRICS_PORT


def test_the_policy_lets_metrics_in_and_questions_out(helm: Helm) -> None:
    policy = the(helm.template(ALL_ON), "NetworkPolicy")["spec"]
    assert policy["ingress"] == [{"ports": [{"port": port, "protocol": "TCP"} for port in (9090, 8081)]}]
    server, dns, progress = policy["egress"]
    assert [each["port"] for each in server["ports"]] == [443, 6443]
    assert [each["port"] for each in dns["ports"]] == [53, 53]
    assert [each["port"] for each in progress["ports"]] == [names.STATUS_PORT]
    assert progress["to"][0]["podSelector"]["matchLabels"] == {names.ROLE: names.CONTROLLER}


def test_pods_of_jobs_admit_operator_kuberay_and_prometheus(helm: Helm) -> None:
    manifests = helm.template()
    given = yaml.safe_load(the(manifests, "ConfigMap")["data"]["config.yaml"])["jobNetworkPolicy"]
    (operator,) = given["operator"]
    labels = the(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    assert operator["podSelector"]["matchLabels"].items() <= labels
    assert operator["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": NAMESPACE}
    (kuberay,), (prometheus,) = given["kubeRay"], given["prometheus"]
    component, name = "app.kubernetes.io/component", "app.kubernetes.io/name"
    assert kuberay == {"namespaceSelector": {}, "podSelector": {"matchLabels": {component: "kuberay-operator"}}}
    assert prometheus == {"namespaceSelector": {}, "podSelector": {"matchLabels": {name: "prometheus"}}}


def test_monitors_look_where_jobs_are_run(helm: Helm) -> None:
    def where(values: Values) -> Any:
        manifests = helm.template({"podMonitor": {"enabled": True, "additionalLabels": {"release": "x"}}, **values})
        monitor = the(manifests, "PodMonitor", f"{RELEASE}-jobs")
        assert monitor["metadata"]["labels"]["release"] == "x"
        return monitor["spec"]["namespaceSelector"]

    assert where({}) == {"any": True}
    assert where(NAMESPACED) == {"matchNames": ["team-a", "team-b"]}


def test_the_chart_carries_the_crd_of_the_repository() -> None:
    """`make generate` writes both."""
    assert (CHART / "files/rlhfjobs.yaml").read_bytes() == (ROOT / "crds/rlhfjobs.yaml").read_bytes()


@pytest.mark.parametrize("keep", [True, False])
def test_the_crd_is_rendered_as_it_is(helm: Helm, keep: bool) -> None:
    rendered = the(helm.template({"crds": {"keep": keep}}), "CustomResourceDefinition")
    original = yaml.safe_load((ROOT / "crds/rlhfjobs.yaml").read_text())
    assert rendered["spec"] == original["spec"]
    assert rendered["metadata"]["name"] == original["metadata"]["name"]
    kept = rendered["metadata"].get("annotations", {}).get("helm.sh/resource-policy")
    assert kept == ("keep" if keep else None)


def test_alerts_have_the_values_labels_and_thresholds(helm: Helm) -> None:
    def memory(**alerts: Any) -> tuple[Any, str]:
        rule = the(helm.template({"monitoring": {"alerts": {"enabled": True, **alerts}}}), "PrometheusRule")
        rules = {each["alert"]: each["expr"] for group in rule["spec"]["groups"] for each in group["rules"]}
        return rule["metadata"]["labels"].get("release"), rules["RLHFMemoryNearLimit"]

    assert memory() == (None, "max by (namespace, job) (rlhf_memory_used_ratio) > 0.95")
    given = memory(additionalLabels={"release": "x"}, thresholds={"memoryRatio": 0.8})
    assert given == ("x", "max by (namespace, job) (rlhf_memory_used_ratio) > 0.8")


def test_dashboards_are_found_by_grafana_and_whole(helm: Helm) -> None:
    manifests = helm.template({"monitoring": {"dashboards": {"enabled": True}}})
    made = [each for each in manifests if each["metadata"].get("labels", {}).get("grafana_dashboard") == "1"]
    written = {file.name: file.read_text() for file in (CHART / "files/dashboards").iterdir()}
    assert {name: text for each in made for name, text in each["data"].items()} == {
        f"rlhf-{name}": text.removesuffix("\n") for name, text in written.items()
    }
