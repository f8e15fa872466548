"""The chart's schema knows every value, and a slip is one sentence with its path."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.helm.rendering import CHART, Helm, Values

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SLIPS: dict[str, tuple[Values, str]] = {
    "a name that does not exist": ({"replicas": 2}, "additional properties 'replicas' not allowed"),
    "one inside": ({"trainer": {"imagee": "x"}}, "'/trainer': additional properties 'imagee' not allowed"),
    "deeper": ({"trainer": {"storage": {"class": "x"}}}, "'/trainer/storage': additional properties 'class'"),
    "a number as text": ({"replicaCount": "two"}, "'/replicaCount': got string, want integer"),
    "a word that is none": ({"image": {"pullPolicy": "Sometimes"}}, "'/image/pullPolicy': value must be one of"),
    "a quantity": ({"trainer": {"sharedMemory": "16 GB"}}, "'/trainer/sharedMemory': '16 GB' does not match"),
    "a number that is a quantity": (
        {"trainer": {"worker": {"cpu": 8}}},
        "'/trainer/worker/cpu': got number, want string",
    ),
    "too short a time": ({"trainer": {"gracePeriodSeconds": 5}}, "'/trainer/gracePeriodSeconds': minimum"),
    "a namespace": ({"watchNamespaces": ["Team A"]}, "'/watchNamespaces/0': 'Team A' does not match"),
}


@pytest.mark.parametrize(("values", "sentence"), SLIPS.values(), ids=SLIPS)
def test_a_slip_is_named_with_its_path(helm: Helm, values: Values, sentence: str) -> None:
    assert sentence in helm.complaint(values)


def open_objects(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of the objects of a schema that take keys of any name."""
    if schema.get("type") == "object" and schema.get("additionalProperties") is not False:
        yield path
    for name, inside in schema.get("properties", {}).items():
        yield from open_objects(inside, f"{path}/{name}")


def test_only_maps_of_kubernetes_take_any_name() -> None:
    assert set(open_objects(SCHEMA)) == {
        "/global",
        "/commonLabels",
        "/serviceAccount/annotations",
        "/resources",
        "/nodeSelector",
        "/affinity",
        "/podAnnotations",
        "/podLabels",
        "/podMonitor/additionalLabels",
    }


def leaves(schema: dict[str, Any], path: str = "") -> set[str]:
    """Paths of the values that a schema describes."""
    inside = schema.get("properties")
    if not inside:
        return {path}
    return set().union(*(leaves(each, f"{path}/{name}") for name, each in inside.items()))


def defaulted(values: Any, described: set[str], path: str = "") -> set[str]:
    """Paths of the values that a file sets; below what the schema describes it is not looked into."""
    if path in described or not isinstance(values, dict):
        return {path}
    return set().union(*(defaulted(each, described, f"{path}/{name}") for name, each in values.items()))


def test_every_value_stands_in_values_yaml() -> None:
    described = leaves(SCHEMA)
    assert defaulted(DEFAULTS, described) == described - {"/global"}
