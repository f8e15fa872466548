"""The chart's schema knows every value, and a slip is one sentence with its path."""

import functools
import json
import operator
from collections.abc import Iterator
from typing import Any

import yaml

from tests.each import each_case
from tests.helm.rendering import CHART, Helm, Values

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
OF_PARENTS = {"/global", "/enabled"}
"""What a chart that contains this one may set."""
SLIPS: dict[str, tuple[Values, str]] = {
    "a name that does not exist": ({"replicas": 2}, "additional properties 'replicas' not allowed"),
    "one inside": ({"trainer": {"imagee": "x"}}, "'/trainer': additional properties 'imagee' not allowed"),
    "deeper": ({"trainer": {"storage": {"class": "x"}}}, "'/trainer/storage': additional properties 'class'"),
    "a number as text": ({"replicaCount": "two"}, "'/replicaCount': got string, want integer"),
    "a word that is none": ({"image": {"pullPolicy": "Sometimes"}}, "'/image/pullPolicy': value must be one of"),
    "a quantity": ({"trainer": {"sharedMemory": "16 GB"}}, "'/trainer/sharedMemory': '16 GB' does not match"),
    "a quantity that is neither text nor number": (
        {"trainer": {"worker": {"cpu": True}}},
        "'/trainer/worker/cpu': got boolean, want number or string",
    ),
    "no CPU": ({"trainer": {"worker": {"cpu": 0}}}, "'/trainer/worker/cpu': minimum"),
    "a page that is no URL": (
        {"monitoring": {"alerts": {"runbookUrl": "docs/runbooks.md"}}},
        "'/monitoring/alerts/runbookUrl': 'docs/runbooks.md' does not match",
    ),
    "a registry that is a URL": (
        {"image": {"registry": "https://a.example"}},
        "'/image/registry': 'https://a.example'",
    ),
    "a field that no group of nodes has": (
        {"cluster": {"nodeGroups": [{"matchLabels": {}, "maximum": 3}]}},
        "'/cluster/nodeGroups/0': additional properties 'maximum' not allowed",
    ),
    "too short a time": ({"trainer": {"gracePeriodSeconds": 5}}, "'/trainer/gracePeriodSeconds': minimum"),
    "a namespace": ({"watchNamespaces": ["Team A"]}, "'/watchNamespaces/0': 'Team A' does not match"),
    "a name of objects": ({"nameOverride": "UPPER_x"}, "'/nameOverride': 'UPPER_x' does not match"),
    "a resource": ({"trainer": {"gpuResourceName": "a b"}}, "'/trainer/gpuResourceName': 'a b' does not match"),
    "memory in thousandths": (
        {"trainer": {"worker": {"memory": "1m"}}},
        "'/trainer/worker/memory': '1m' does not match",
    ),
    "nobody, which would be everybody": (
        {"jobNetworkPolicy": {"kubeRay": [{}]}},
        "'/jobNetworkPolicy/kubeRay/0': minProperties",
    ),
    "the name of a label": ({"commonLabels": {"a b": "c"}}, "'/commonLabels': additional properties 'a b' not allowed"),
    "a label's value": ({"podLabels": {"a": "b c"}}, "'/podLabels/a': 'b c' does not match"),
    "a label that the chart sets": (
        {"podLabels": {"app.kubernetes.io/name": "x"}},
        "'/podLabels/app.kubernetes.io~1name': false schema",
    ),
    "a weight of nothing": ({"queue": {"namespaceWeights": {"a": 0}}}, "/queue/namespaceWeights/a"),
    "a GPU that is no list": ({"cluster": {"gpus": {"name": "mine"}}}, "'/cluster/gpus': got object, want array"),
    "a secret by its name alone": ({"imagePullSecrets": ["a"]}, "'/imagePullSecrets/0': got string, want object"),
    "a variable with two values": (
        {"trainer": {"env": [{"name": "A", "value": "b", "secret": {"name": "c", "key": "d"}}]}},
        "'/trainer/env/0': 'oneOf' failed",
    ),
    "a variable of the operator's": (
        {"trainer": {"env": [{"name": "RLHF_ATTEMPT", "value": "1"}]}},
        "'/trainer/env/0/name': 'not' failed",
    ),
    "a volume that is two": (
        {"trainer": {"modelCache": {"emptyDir": {}, "hostPath": {"path": "/a"}}}},
        "'/trainer/modelCache': maxProperties",
    ),
    "a level of logs": ({"logging": {"level": "INFO"}}, "'/logging/level': value must be one of 'debug', 'info'"),
    "an object without a kind": ({"extraObjects": [{"apiVersion": "v1"}]}, "'/extraObjects/0': missing properties"),
}


@each_case(("values", "sentence"), SLIPS.values(), ids=SLIPS)
def test_a_slip_is_named_with_its_path(helm: Helm, values: Values, sentence: str) -> None:
    assert sentence in helm.complaint(values)


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """A part of the schema, or the definition that it refers to."""
    if "$ref" not in schema:
        return schema
    found: dict[str, Any] = SCHEMA["definitions"][schema["$ref"].removeprefix("#/definitions/")]
    return found


def open_objects(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of the objects of a schema that take more than the keys they name."""
    schema = resolved(schema)
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if schema.get("type") == "object" and not is_closed:
        yield path
    for name, inside in schema.get("properties", {}).items():
        yield from open_objects(inside, f"{path}/{name}")


def test_only_maps_of_kubernetes_take_any_name() -> None:
    assert set(open_objects(SCHEMA)) == {
        "/global",
        "/commonLabels",
        "/serviceAccount/annotations",
        "/trainer/modelCache",
        "/monitoring/alerts/additionalLabels",
        "/trainer/controller/template",
        "/trainer/worker/template",
        "/resources",
        "/nodeSelector",
        "/affinity",
        "/podAnnotations",
        "/podLabels",
        "/podSecurityContext",
        "/securityContext",
        "/metrics/tls/monitor",
        "/queue/namespaceWeights",
        "/podMonitor/additionalLabels",
        "/serviceMonitor/additionalLabels",
    }


def leaves(schema: dict[str, Any], path: str = "") -> set[str]:
    """Paths of the values that a schema describes."""
    inside = resolved(schema).get("properties")
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
    assert defaulted(DEFAULTS, described) == described - OF_PARENTS


def emptied(values: Any) -> Any:
    """The values that are empty, as null, with the maps that they are in."""
    if isinstance(values, dict) and values:
        kept = {name: emptied(each) for name, each in values.items() if has_empty(each)}
        return kept or None
    return None


def has_empty(values: Any) -> bool:
    """True for what is empty, and for maps with something empty in them."""
    if isinstance(values, dict) and values:
        return any(map(has_empty, values.values()))
    return values in ("", {}, [])


def test_null_is_the_default(helm: Helm) -> None:
    """`nodeSelector:` without anything after it is often left in a file."""
    assert helm.template(emptied(DEFAULTS)) == helm.template()
    assert helm.template(dict.fromkeys(DEFAULTS)) == helm.template()


def at(path: str) -> Any:
    """A default by its path."""
    return functools.reduce(operator.getitem, path.strip("/").split("/"), DEFAULTS)


def told() -> dict[str, str]:
    """Each value that the README lists -> its default there, empty where that is told in words."""
    rows = [line.split(" | ") for line in (CHART / "README.md").read_text().splitlines() if line.startswith("| `")]
    return {name.strip("| `"): default.strip("`") if default.startswith("`") else "" for name, default, *_ in rows}


def test_the_readme_lists_every_value_with_its_default() -> None:
    assert set(told()) == {path.strip("/").replace("/", ".") for path in leaves(SCHEMA) - OF_PARENTS}
    given = {path: yaml.safe_load(default) for path, default in told().items() if default}
    assert given == {path: at(path.replace(".", "/")) for path in given}
