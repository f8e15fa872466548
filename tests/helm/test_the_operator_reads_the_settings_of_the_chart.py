"""The settings file that the chart writes is the one that the operator reads, field for field."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_api.contract import CPUS, DNS_SUBDOMAIN, LABEL_KEY, LABEL_VALUE, QUANTITY
from rlhf_api.problems import SpecError
from rlhf_operator.settings import NodesOfGroup, Settings
from tests.each import each_case
from tests.helm.rendering import CHART, NAMESPACE, RELEASE, Helm, Values, the

OTHER: Values = {
    "watchNamespaces": ["team-a"],
    "trainer": {
        "image": "registry/trainer:1",
        "pullPolicy": "Always",
        "imagePullSecrets": [{"name": "registry"}, {"name": "other"}],
        "serviceAccountName": "trainer",
        "env": [
            {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
            {"name": "HF_TOKEN", "secret": {"name": "hub", "key": "token"}},
        ],
        "modelCache": {"persistentVolumeClaim": {"claimName": "models"}},
        "rayVersion": "2.61.0",
        "gpuResourceName": "amd.com/gpu",
        "controller": {"cpu": "1", "memory": "1Gi", "template": {"metadata": {"labels": {"team": "a"}}}},
        "worker": {"cpu": "2", "memory": "2Gi", "template": {"spec": {"nodeSelector": {"pool": "a"}}}},
        "sharedMemory": "3Gi",
        "gracePeriodSeconds": 31,
        "storage": {"size": "4Gi", "storageClassName": "fast", "accessMode": "ReadWriteOnce"},
        "statusIntervalSeconds": 0.5,
    },
    "cluster": {
        "gpus": [
            {
                "name": "mine-96g",
                "product": "NVIDIA-X9000",
                "memoryGB": 96,
                "bf16Tflops": 148.5,
                "fp32Tflops": 44,
                "memoryGBps": 4000,
                "linkGBps": 900,
                "hostGBps": 64,
            }
        ],
        "nodeGroups": [
            {
                "matchLabels": {"pool": "a", "topology.kubernetes.io/zone": "b"},
                "intraNodeGBps": 600,
                "interNodeGbps": 100,
                "pricePerGpuHour": 2,
                "name": "grows",
                "max": 3,
                "gpu": "NVIDIA-X9000",
                "gpusPerNode": 8,
                "cpu": "100",
                "memory": "1Ti",
                "taints": ({"key": "dedicated", "value": "gpu", "effect": "NoSchedule"},),
                "deadlineSeconds": 900,
                "min": 1,
                "spot": True,
            }
        ],
        "topology": [{"label": "topology.kubernetes.io/zone", "gbps": 100}],
    },
    "queue": {"namespaceWeights": {"team-a": 2}},
    "jobNetworkPolicy": {"kubeRay": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "prometheus": []},
    "sandboxes": {"dns": [{"ipBlock": {"cidr": "10.0.0.10/32"}}]},
    "caBundle": {"configMap": "authorities", "key": "all.pem"},
    "fullnameOverride": "other",
}
CLOSED_ELSEWHERE: Values = {"jobNetworkPolicy": {"enabled": False}, "sandboxes": {"dns": []}}
"""A cluster with policies of its own."""


def config(helm: Helm, values: Values | None = None) -> str:
    """The file as it is mounted."""
    return str(the(helm.template(values), "ConfigMap")["data"]["config.yaml"])


def read(helm: Helm, folder: Path, values: Values | None = None) -> dict[str, Any]:
    """The settings that the operator reads from the file."""
    file = folder / "config.yaml"
    file.write_text(config(helm, values))
    return Settings.read(file).model_dump(by_alias=True)


def test_the_defaults_are_those_of_the_operator(helm: Helm, tmp_path: Path) -> None:
    """Besides the election, which a pod has and a laptop has not, and the peers of pods."""
    expected = Settings().model_dump(by_alias=True)
    assert read(helm, tmp_path, CLOSED_ELSEWHERE) == {**expected, "leaseName": RELEASE, "leaseNamespace": NAMESPACE}


def test_without_an_election_there_is_no_lease(helm: Helm, tmp_path: Path) -> None:
    found = read(helm, tmp_path, {"leaderElection": {"enabled": False}, **CLOSED_ELSEWHERE})
    assert found == Settings().model_dump(by_alias=True)


def test_every_setting_can_be_changed(helm: Helm, tmp_path: Path) -> None:
    found, defaults = read(helm, tmp_path, OTHER), Settings().model_dump(by_alias=True)
    trainer = OTHER["trainer"]
    assert found == {
        "namespaces": ("team-a",),
        "readNodes": False,
        "trainerImage": trainer["image"],
        "imagePullPolicy": trainer["pullPolicy"],
        **{name: value for name, value in trainer.items() if name not in ("image", "pullPolicy")},
        "imagePullSecrets": ("registry", "other"),
        "env": ({**trainer["env"][0], "secret": None}, {**trainer["env"][1], "value": None}),
        "caBundle": OTHER["caBundle"],
        "queue": OTHER["queue"],
        **{name: tuple(value) for name, value in OTHER["cluster"].items()},
        "jobNetworkPolicy": {
            "operator": found["jobNetworkPolicy"]["operator"],
            "kubeRay": (OTHER["jobNetworkPolicy"]["kubeRay"][0],),
            "prometheus": (),
        },
        "sandboxDns": tuple(OTHER["sandboxes"]["dns"]),
        "leaseName": "other",
        "leaseNamespace": NAMESPACE,
    }
    assert not [name for name in defaults if found[name] == defaults[name]]


def test_a_quantity_may_be_a_number(helm: Helm, tmp_path: Path) -> None:
    size, storage = {"cpu": 4, "memory": 16 * 2**30}, {"size": 10**12}
    numbers = {"controller": size, "worker": {"cpu": 0.5}, "sharedMemory": 2**30, "storage": storage}
    group = {"matchLabels": {"pool": "a"}, "cpu": 100, "memory": 2**40}
    found = read(helm, tmp_path, {"trainer": numbers, "cluster": {"nodeGroups": [group]}})
    assert (found["controller"]["cpu"], found["controller"]["memory"]) == ("4", "17179869184")
    assert (found["worker"]["cpu"], found["sharedMemory"]) == ("0.5", "1073741824")
    assert found["storage"]["size"] == "1000000000000"
    (nodes,) = found["nodeGroups"]
    assert (nodes["cpu"], nodes["memory"]) == ("100", "1099511627776")


@pytest.mark.parametrize(("written", "taken"), [("4", "4"), ("0.5", "0.5"), ("'4'", "4")])
def test_a_settings_file_may_have_numbers(tmp_path: Path, written: str, taken: str) -> None:
    """Without the chart, nobody quotes them."""
    (tmp_path / "config.yaml").write_text(f"worker: {{cpu: {written}, memory: 1073741824}}")
    assert Settings.read(tmp_path / "config.yaml").worker.cpu == taken


def test_a_settings_file_with_true_for_cpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("worker: {cpu: true, memory: 1Gi}")
    with pytest.raises(SpecError, match=r"worker\.cpu: "):
        Settings.read(tmp_path / "config.yaml")


def test_every_setting_stands_in_the_file(helm: Helm) -> None:
    """A new field of the operator's settings needs a value in the chart."""
    written = yaml.safe_load(config(helm, OTHER))
    assert set(written) == set(Settings().model_dump(by_alias=True))


@pytest.mark.parametrize(("watched", "allowed", "reads"), [([], True, True), ([], False, False), (["a"], True, False)])
def test_nodes_are_read_where_a_cluster_role_allows_it(
    helm: Helm, tmp_path: Path, watched: list[str], allowed: bool, reads: bool
) -> None:
    found = read(helm, tmp_path, {"watchNamespaces": watched, "rbac": {"readNodes": allowed}})
    assert found["readNodes"] is reads


@each_case("quantity", ["8", "0.5", "500m", "16Gi", "2.5G", "64Ti", "100k"])
def test_a_quantity_of_the_chart_is_one_to_the_operator(quantity: str) -> None:
    definitions = json.loads((CHART / "values.schema.json").read_text())["definitions"]
    assert any(re.search(definitions[kind]["pattern"], quantity) for kind in ("cpu", "memory"))
    assert re.search(QUANTITY, quantity)


def test_forms_are_those_of_the_operator() -> None:
    definitions = json.loads((CHART / "values.schema.json").read_text())["definitions"]
    fields = NodesOfGroup(match_labels={}).model_dump(by_alias=True)
    assert set(definitions["nodeGroup"]["properties"]) == set(fields)
    expected = {"labelKey": LABEL_KEY, "labelValue": LABEL_VALUE, "objectName": DNS_SUBDOMAIN, "cpu": CPUS}
    assert {kind: definitions[kind]["pattern"] for kind in expected} == expected


def test_the_values_of_a_small_cluster_are_taken(helm: Helm, tmp_path: Path) -> None:
    """The file that the docs name, and with which the tests of the cluster install the chart."""
    small = yaml.safe_load((CHART / "examples/small.yaml").read_text())
    found = read(helm, tmp_path, small)
    assert found["worker"] == {**small["trainer"]["worker"], "template": {}}
    assert found["storage"].items() >= small["trainer"]["storage"].items()


def test_a_template_with_the_operators_own_is_refused(helm: Helm, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"worker\.template\.spec\.restartPolicy: is the operator's"):
        read(helm, tmp_path, {"trainer": {"worker": {"template": {"spec": {"restartPolicy": "Always"}}}}})
