"""The CustomResourceDefinition of RLHFJob."""

import json
from collections.abc import Iterable
from typing import Any

from rlhf_api import kubectl_yaml
from rlhf_api.crd.cel import CEL, Rule
from rlhf_api.crd.changes import rules_of_changes
from rlhf_api.crd.schema import structural
from rlhf_api.crd.union import Schema
from rlhf_api.names import GROUP, KIND, VERSION
from rlhf_api.spec import JobSpec
from rlhf_api.status import Status

PLURAL = "rlhfjobs"
HEADER = "# Made from crds/rlhf_api by `make generate`; do not edit.\n"
COLUMNS = (
    ("Algorithm", "string", ".spec.algorithm.name", 0),
    ("Phase", "string", ".status.phase", 0),
    ("Step", "integer", ".status.progress.step", 0),
    ("Total", "integer", ".status.progress.totalSteps", 0),
    ("Reward", "string", '.status.metrics[?(@.name=="reward/mean")].value', 0),
    ("GPUs", "integer", ".status.mapping.gpus", 0),
    ("Attempt", "integer", ".status.attempt", 1),
    ("Queue", "string", ".status.queue", 1),
    ("RayJob", "string", ".status.rayJobName", 1),
    ("Reason", "string", ".status.lastFailure.reason", 1),
    ("Remaining", "integer", ".status.progress.remainingSeconds", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
"""Name, type, path and priority; a column of priority 1 is shown by `-o wide`."""


def definition() -> dict[str, Any]:
    """The whole object."""
    document = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}", "labels": {"app.kubernetes.io/part-of": "rlhf-operator"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["rlhf", "rlj"],
                "categories": ["all"],
            },
            "versions": [_version()],
        },
    }
    return dict(json.loads(json.dumps(document)))  # no object twice: YAML would write an alias


def text() -> str:
    """The object as YAML."""
    return HEADER + kubectl_yaml.write(definition())


def _version() -> dict[str, Any]:
    columns = [
        {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})
        for name, kind, path, priority in COLUMNS
    ]
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "selectableFields": [{"jsonPath": ".status.phase"}, {"jsonPath": ".spec.algorithm.name"}],
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": root()},
    }


def root() -> Schema:
    """The schema of the resource, with its rules."""
    spec = structural(JobSpec)
    schema: Schema = {
        "type": "object",
        "description": "A job of RLHF or one of its stages, run by the rlhf-operator.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": structural(Status),
        },
    }
    _add(schema, ((path, rule) for path, rules in CEL.items() for rule in rules))
    _add(schema, rules_of_changes(spec))
    return schema


def _add(schema: Schema, rules: Iterable[tuple[str, Rule]]) -> None:
    for path, rule in rules:
        node = schema
        for part in path.replace("[]", ".[]").split(".") if path else ():
            node = node["items"] if part == "[]" else node["properties"][part]
        node.setdefault("x-kubernetes-validations", []).append(rule.document())
