"""Parts of pod templates are merged as Kubernetes merges patches."""

from __future__ import annotations

from typing import Any

from rlhf_operator.overlay import REQUIRED, TERMS, avoid_nodes, merged


def required(*terms: dict[str, Any]) -> dict[str, Any]:
    return {"affinity": {"nodeAffinity": {REQUIRED: {TERMS: list(terms)}}}}


def has(key: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": list(values)}


def test_containers_and_what_is_in_them_are_merged_by_their_keys() -> None:
    ours = {
        "containers": [
            {"name": "ray", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}], "tty": False},
            {"name": "log"},
        ],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
    }
    over = {
        "containers": [
            {"name": "ray", "env": [{"name": "B", "value": "3"}], "resources": {"limits": {"rdma/hca": "4"}}},
            {"name": "mine", "image": "x"},
        ],
        "volumes": [{"name": "data", "hostPath": {"path": "/data"}}],
    }
    found = merged(ours, over)
    assert found["containers"] == [
        {
            "name": "ray",
            "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}],
            "tty": False,
            "resources": {"limits": {"rdma/hca": "4"}},
        },
        {"name": "log"},
        {"name": "mine", "image": "x"},
    ]
    assert [each["name"] for each in found["volumes"]] == ["scratch", "data"]


def test_entries_without_a_key_are_added_values_replaced() -> None:
    one, other = {"key": "a", "operator": "Exists"}, {"key": "b", "operator": "Exists"}
    assert merged({"tolerations": [one]}, {"tolerations": [one, other]}) == {"tolerations": [one, other]}
    assert merged({"drop": ["ALL"]}, {"drop": ["NET_RAW"]}) == {"drop": ["NET_RAW"]}
    assert merged({"a": 1, "b": {"c": 2}}, {"a": None, "b": {"d": 3}}) == {"a": 1, "b": {"c": 2, "d": 3}}


def test_null_says_nothing_however_deep_it_stands() -> None:
    over = {"nodeSelector": {"a": None, "b": "c"}, "tolerations": [{"key": "d", "value": None}], "affinity": None}
    assert merged({}, over) == {"nodeSelector": {"b": "c"}, "tolerations": [{"key": "d"}]}


def test_of_two_choices_of_nodes_both_hold() -> None:
    a, b = ({"matchExpressions": [has("gpu", product)]} for product in ("a", "b"))
    zone = {"matchExpressions": [has("zone", "z")]}
    assert merged(required(a, b), required(zone)) == required(
        {"matchExpressions": [has("gpu", "a"), has("zone", "z")]},
        {"matchExpressions": [has("gpu", "b"), has("zone", "z")]},
    )
    off = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("n1", "n2")]}
    assert merged(required(a, b), avoid_nodes(["n1", "n2"])) == required({**a, **off}, {**b, **off})
    assert merged({}, avoid_nodes(["n1", "n2"])) == required(off)
    assert avoid_nodes([]) == {}
