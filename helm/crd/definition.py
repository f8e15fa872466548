"""The CustomResourceDefinition of RLHFJob, with rules in CEL: those of `rlhf_api.checks.rules`, and rules for updates.

An update may change the fields that `rlhf_api.checks.resume` allows, some only while the job is suspended.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from helm.crd.compact import compact
from helm.crd.schema import Schema, structural_schema
from rlhf_api import kubectl_yaml
from rlhf_api.checks.resume import LENGTHS, MAY_CHANGE, is_prefix, may_change
from rlhf_api.checks.rule import Rule
from rlhf_api.checks.rules import ROLES, RULES
from rlhf_api.contract import JOB_NAME
from rlhf_api.expressions import Field, as_cel, entries, validation, without_values
from rlhf_api.job import MAX_NAME_LENGTH
from rlhf_api.names import GROUP, KIND, VERSION
from rlhf_api.pydantic_errors import FORMS
from rlhf_api.spec.job_spec import JobSpec
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
    ("Reason", "string", ".status.reason", 1),
    ("Remaining", "integer", ".status.progress.remainingSeconds", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
"""Columns of `kubectl get`: name, type, JSON path and priority; a column of priority 1 is shown by `-o wide`."""
PAUSED = "self.suspend || oldSelf.suspend"
WHILE_SUSPENDED = "may change only while the job is suspended"
ANOTHER = "is not what it was when the job was made, and would make it another experiment; make a new job"


def definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition."""
    columns = [
        {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})
        for name, kind, path, priority in COLUMNS
    ]
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "selectableFields": [{"jsonPath": ".status.phase"}, {"jsonPath": ".spec.algorithm.name"}],
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": _with_unseen_status(compact(root()))},
    }
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
            "versions": [version],
        },
    }
    return dict(json.loads(json.dumps(document)))  # no object twice: YAML would write an alias


def _with_unseen_status(schema: Schema) -> Schema:
    """Return the schema with a default status for jobs before the operator's first pass.

    Generation -1 is never current, so kstatus (Flux) takes such a job for one in progress.
    """
    status = {**schema["properties"]["status"], "default": {"observedGeneration": -1}}
    return {**schema, "properties": {**schema["properties"], "status": status}}


def text() -> str:
    """Return the CustomResourceDefinition as YAML."""
    return HEADER + kubectl_yaml.write(definition())


def root() -> Schema:
    """Return the OpenAPI schema of an RLHFJob, with its rules in CEL."""
    spec = structural_schema(JobSpec)
    shape = f"self.metadata.name.matches('{JOB_NAME}')"
    message = f"metadata.name: expected at most {MAX_NAME_LENGTH} characters: {FORMS[JOB_NAME]}"
    schema: Schema = {
        "type": "object",
        "description": "A job of RLHF, such as SFT, RewardModel or PPO, run by the rlhf-operator.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": structural_schema(Status),
        },
    }
    _add(schema, [("", validation(f"size(self.metadata.name) <= {MAX_NAME_LENGTH} && {shape}", message))])
    _add(schema, (in_cel(rule, spec) for rule in RULES))
    _add(schema, _experiment(spec, "spec"))
    moved = validation(_same("storage"), "cannot be moved; make a new job", "storage")
    _add(schema, [("spec.checkpoint", moved), *(("spec", rule) for rule in [*_paused(), *_lengths()])])
    return schema


def in_cel(rule: Rule, spec: Schema) -> tuple[str, dict[str, str]]:
    """Return a rule as (path, CEL validation); path: a list's entries if the rule reads only these, else the spec."""
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
        about = f"{field[1:]}: {message}" if field else message
        return "spec", validation(" || ".join([*missing, f"self.{at}.all(each, {test})"]), about, at)


def _add(schema: Schema, rules: Iterable[tuple[str, dict[str, str]]]) -> None:
    for path, rule in rules:
        node = schema
        for part in path.replace("[]", ".[]").split(".") if path else ():
            node = node["items"] if part == "[]" else node["properties"][part]
        node.setdefault("x-kubernetes-validations", []).append(rule)


def _experiment(schema: Schema, path: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (path, validation) for each field of an object that an update may not change, also in objects below."""
    needed = schema.get("required", [])
    for field, each in schema["properties"].items():
        below = f"{path}.{field}"
        pattern = below.replace("[]", ".*")
        if below in LENGTHS or may_change(pattern):
            continue
        if any(is_prefix(pattern, each) for each in MAY_CHANGE):
            if field not in needed and "default" not in each:
                yield path, validation(f"has(self.{field}) == has(oldSelf.{field})", ANOTHER, field)
            yield from _parts(each, below)
        elif field in needed or "default" in each:
            yield path, validation(f"self.{field} == oldSelf.{field}", ANOTHER, field)
        else:
            yield path, validation(_same(field), ANOTHER, field)


def _parts(schema: Schema, path: str) -> Iterator[tuple[str, dict[str, str]]]:
    if schema["type"] == "object":
        yield from _experiment(schema, path)
        return
    (key,) = schema["x-kubernetes-list-map-keys"]
    names = f"map(each, each.{key})"
    yield path, validation(f"self.{names} == oldSelf.{names}", ANOTHER)
    yield from _experiment(schema["items"], f"{path}[]")


def _paused() -> Iterator[dict[str, str]]:
    fields = {name: f"self.{name} == oldSelf.{name}" for name in ("resources", "placement", "runtime")}
    fields |= {f"rollout.{name}": _same(f"rollout.{name}") for name in ("tensorParallel", "pipelineParallel")}
    for role in ROLES:
        missing = f"!has(self.models.{role}) || !has(oldSelf.models.{role})"
        fields[f"models.{role}"] = f"{missing} || {_same(f'models.{role}.parallelism')}"
    for field, same in fields.items():
        what = "parallelism " if field.startswith("models.") else ""
        yield validation(f"{PAUSED} || {same}", what + WHILE_SUSPENDED, field)


def _same(field: str) -> str:
    """Return CEL that is true if an optional field is unset before and after an update, or equal."""
    return f"(has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field}))"


def _lengths() -> Iterator[dict[str, str]]:
    """Yield rules that let an update change the job's number of steps only if no learning rate depends on it."""
    scheduled = " || ".join(
        f"has(self.models.{role}) && has(self.models.{role}.optimizer) && "
        f"self.models.{role}.optimizer.schedule != 'Constant'"
        for role in ROLES
    )
    for path in LENGTHS:
        field = path.removeprefix("spec.training.")
        yield validation(
            f"{_same(f'training.{field}')} || !({scheduled})",
            "cannot change, since a schedule depends on it; make a new job",
            "training",
        )
