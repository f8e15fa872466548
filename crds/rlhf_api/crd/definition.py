"""The CustomResourceDefinition of RLHFJob."""

import json
from collections.abc import Iterable
from typing import Any

from rlhf_api import kubectl_yaml
from rlhf_api.contract import FORMS, JOB_NAME
from rlhf_api.crd.changes import rules_of_changes
from rlhf_api.crd.schema import structural
from rlhf_api.crd.union import Schema
from rlhf_api.expressions import Field, as_cel, entries, validation, without_values
from rlhf_api.job import LONGEST_NAME
from rlhf_api.names import GROUP, KIND, VERSION
from rlhf_api.rules import RULES, Rule
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
    shape = f"self.metadata.name.matches('{JOB_NAME}')"
    message = f"metadata.name: expected at most {LONGEST_NAME} characters: {FORMS[JOB_NAME]}"
    schema: Schema = {
        "type": "object",
        "description": "A job of RLHF, such as SFT, RewardModel or PPO, run by the rlhf-operator.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": structural(Status),
        },
    }
    _add(schema, [("", validation(f"size(self.metadata.name) <= {LONGEST_NAME} && {shape}", message))])
    _add(schema, (in_cel(rule, spec) for rule in RULES))
    _add(schema, rules_of_changes(spec))
    return schema


def in_cel(rule: Rule, spec: Schema) -> tuple[str, dict[str, str]]:
    """(path, validation) of a rule: at the entries of a list if it reads nothing else, otherwise at the spec."""
    at, in_list, field = rule.path.partition("[]")
    message, places = without_values(rule.message), {"spec": ("self", spec)}
    if not in_list:
        return "spec", validation(as_cel(rule.test, places), message, at)
    entry = entries(spec, at)
    try:
        return f"spec.{at}[]", validation(as_cel(rule.test, {"each": ("self", entry)}), message, field[1:])
    except KeyError:
        test = as_cel(rule.test, {**places, "each": ("each", entry)})
        missing = [f"!{given}" for given in Field(at).presence(places)]
        return "spec", validation(" || ".join([*missing, f"self.{at}.all(each, {test})"]), message, at)


def _add(schema: Schema, rules: Iterable[tuple[str, dict[str, str]]]) -> None:
    for path, rule in rules:
        node = schema
        for part in path.replace("[]", ".[]").split(".") if path else ():
            node = node["items"] if part == "[]" else node["properties"][part]
        node.setdefault("x-kubernetes-validations", []).append(rule)
