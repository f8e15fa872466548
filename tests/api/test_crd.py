"""The definition for a cluster is made from the typed spec, and nothing in it is without a bound or a description."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from helm.crd.__main__ import generated
from helm.crd.definition import COLUMNS, definition, root
from helm.crd.schema import merge_union
from rlhf_api.checks.resume import LENGTHS, MAY_CHANGE
from rlhf_api.spec.job_spec import JobSpec
from rlhf_api.status import Metric, Status
from tests.each import each_case

ANNOTATION_BYTES = 262_144
"""What `kubectl apply` may keep of an object in an annotation."""
MOST_BYTES = ANNOTATION_BYTES * 76 // 100
"""Room that the definition may take; the rest is for fields to come."""


def nodes(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within a schema, by its path."""
    yield path, schema
    for name, each in schema.get("properties", {}).items():
        yield from nodes(each, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


def applied_bytes(document: dict[str, Any]) -> int:
    """Bytes of an object in the annotation of `kubectl apply`, which writes JSON as Go does: <, > and & as six each."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    return len(text.encode()) + 5 * sum(map(text.count, "<>&")) + 1


@cache
def fields(part: str) -> dict[str, dict[str, Any]]:
    """Every schema of `spec` or `status`, by its path."""
    return dict(nodes(root()["properties"][part], part))


@each_case("path, text", lambda: generated().items(), ids=lambda each: each.name if isinstance(each, Path) else "")
def test_the_committed_file_is_what_is_made(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "run `make generate`"


def test_a_message_of_the_server_has_no_hole_for_a_value() -> None:
    messages = [
        rule["message"]
        for each in (*fields("spec").values(), root())
        for rule in each.get("x-kubernetes-validations", ())
    ]
    assert len(messages) > 50
    assert not [message for message in messages if "{" in message]


def test_client_side_apply_has_room_for_it_to_grow() -> None:
    assert applied_bytes(definition()) <= MOST_BYTES


def test_everything_a_user_writes_has_a_bound() -> None:
    bound = {"string": ("maxLength", "enum"), "array": ("maxItems",), "integer": ("maximum",)}
    free = [
        path
        for path, each in fields("spec").items()
        if not any(key in each for key in bound.get(each["type"], ("type",)))
    ]
    maps = [
        path for path, each in fields("spec").items() if "additionalProperties" in each and "maxProperties" not in each
    ]
    assert free + maps == []


def test_every_field_is_described() -> None:
    undescribed = [
        path
        for path, each in {**fields("spec"), **fields("status")}.items()
        if not path.endswith(("spec", "[]", "{}"))
        and not each.get("description", "").endswith((".", "POD -c driver-log`."))
    ]
    assert undescribed == []


@each_case("column", COLUMNS, ids=lambda column: column[0])
def test_a_column_shows_what_is_there(column: tuple[str, str, str, int]) -> None:
    name, kind, path, _ = column
    if name == "Age":
        return
    field = path.split("[?")[0].removeprefix(".")
    found = {**fields("spec"), **fields("status")}[field]
    assert found["type"] in (kind, "array")
    assert found["type"] == kind or "value" in Metric.model_fields


def test_what_may_change_is_in_the_spec() -> None:
    """A field that is renamed in the spec and not in the list would silently be frozen."""
    known = [path.replace("[]", ".*") for path in fields("spec")]
    models = [path.replace(".actor.", ".*.") for path in known]
    assert not [field for field in [*MAY_CHANGE, *LENGTHS] if field != "metadata" and field not in [*known, *models]]


def test_defaults_are_those_of_the_typed_spec() -> None:
    for name, field in JobSpec.model_fields.items():
        schema = fields("spec")[f"spec.{field.alias}"]
        if field.is_required() or field.default is None:
            assert "default" not in schema, name
        elif name != "suspend":
            assert schema["default"] == field.default.model_dump(mode="json", by_alias=True, exclude_none=True)


def test_a_default_of_only_some_algorithms_is_not_given() -> None:
    algorithm = fields("spec")["spec.algorithm"]["properties"]
    assert not [name for name, each in algorithm.items() if "default" in each]
    assert "Default: 0.2 (CISPO 0.99). For PPO" in algorithm["clipRange"]["description"]
    assert "Default: unset (VAPO 0.28, CISPO 5.0). For PPO" in algorithm["clipRangeHigh"]["description"]
    assert "Default: TokenMean (ReMax FixedLength, GRPO SequenceMean" in algorithm["aggregation"]["description"]
    assert "default" not in fields("spec")["spec.algorithm.kl.coefficient"]
    assert fields("spec")["spec.algorithm.kl.controller"]["default"] == "Fixed"


def test_a_field_of_two_types_is_no_union() -> None:
    number, text = ({"properties": {"x": {"type": kind, "description": "X."}}} for kind in ("number", "string"))
    with pytest.raises(TypeError, match="two types"):
        merge_union({"a": number, "b": text}, "x")


def test_the_status_is_that_of_the_typed_status() -> None:
    assert {field.alias for field in Status.model_fields.values()} == set(fields("status")["status"]["properties"])
