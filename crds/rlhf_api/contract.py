"""The base class of all parts of a spec and a status, and the types of field that several of them share."""

import os
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

from rlhf_api.expressions import VALUE, Check

JOB_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
IDENTIFIER = r"^[A-Za-z_][A-Za-z0-9_]*$"
ENTRYPOINT = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
SCHEDULE = ENTRYPOINT.replace("^", "^(Constant|Cosine|", 1).replace("$", ")$")
OWN_CLASS = ENTRYPOINT.replace(r"*:", r"*:)?").replace("^", "^(", 1)
DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LABEL_KEY = rf"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?{_WORD}$"
LABEL_VALUE = rf"^({_WORD})?$"
SECRET_KEY = r"^[-._A-Za-z0-9]+$"
CPUS = r"^[0-9]+(\.[0-9]+)?m?$"
IMAGE = r"^[!-~]+$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"
TIMESTAMP = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[-+]\d\d:\d\d)$"
URI = r"^((hf|job|package|file)://.+|pvc://[a-z0-9][-a-z0-9.]*/.+)$"
SERVICE_URL = (
    r"^https?://([-A-Za-z0-9._]+|\[[0-9A-Fa-f:.]+\])"
    r"(:(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3}))?"
    r"(/[!\"$->A-~]*)?$"
)
OBJECTIVE = r"^(throughput|lowest-cost|fewest-gpus=[0-9]{1,9}(\.[0-9]{1,9})?)$"
STORAGE_URI = r"^(file:///|s3://[^/]|gs://[^/]|pvc://[a-z0-9]).*$"
STORE_URI = r"^(file:///|s3://[^/]|gs://[^/]).*$"
PROJECT = r"^[^/\\#?%:]+$"

CHAT_TEMPLATE, PROMPT_TEMPLATE = "^(Auto|Never|(file|package)://.+)$", r"\{\{"

MAX_INTEGER = 2**31 - 1
"""Largest whole number of a field: the API server can multiply two of them without overflow."""

T = TypeVar("T")
Listed = Annotated[tuple[T, ...], Field(strict=False)]
"""Tuple of the entries of a document's list."""
WHOLE = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
"""Validator that turns a whole float into an int: JSON has one kind of number, so 3.0 and 1e3 are whole."""
Whole = Annotated[int, Field(ge=0, le=MAX_INTEGER), WHOLE]
Count = Annotated[int, Field(ge=1, le=MAX_INTEGER), WHOLE]
NodeCount = Annotated[int, Field(ge=1, le=100_000), WHOLE]
SlotCount = Annotated[int, Field(ge=1, le=1024), WHOLE]
"""Number of slots (GPUs or CPU workers) of one node."""
Name = Annotated[str, Field(pattern=DNS_LABEL, max_length=52)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Identifier = Annotated[str, Field(pattern=IDENTIFIER, max_length=128)]
LabelKey = Annotated[str, Field(pattern=LABEL_KEY, max_length=317)]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE, max_length=63)]
Labels = Annotated[
    dict[LabelKey, LabelValue], Field(max_length=32), BeforeValidator(lambda labels: _without_nulls(labels, labels))
]


def _absolute(uri: str, info: ValidationInfo) -> str:
    """Return a `file://` URI as an absolute one, relative to the folder in the validation context if there is one."""
    context = info.context or {}
    if "folder" not in context or not uri.startswith("file://"):
        return uri
    folder: Path = context["folder"]
    # Not Path.resolve: in a mounted ConfigMap it would follow a link that the next update removes.
    return f"file://{os.path.abspath(folder / uri.removeprefix('file://'))}"  # noqa: PTH100


ONE_PACKAGE = Check(
    VALUE.matches(r"^package://[A-Za-z_][A-Za-z0-9_]*(/.*)?$") | ~VALUE.starts_with("package://"),
    'is "{value}"; expected one package, which is in no other, as in package://name/path',
)
WITHIN_ITSELF = Check(
    ~VALUE.matches(r"^(package|pvc)://.*/\.\.(/.*)?$"), 'holds "..", expected a path within the package or the claim'
)
ABSOLUTE = AfterValidator(_absolute)
Uri = Annotated[str, Field(pattern=URI, max_length=1024), ONE_PACKAGE, WITHIN_ITSELF, ABSOLUTE]
"""Address of a model or of data."""
TemplateUri = Annotated[str, Field(pattern=CHAT_TEMPLATE, max_length=1024), ONE_PACKAGE, WITHIN_ITSELF, ABSOLUTE]
Jinja = Annotated[str, Field(pattern=PROMPT_TEMPLATE, max_length=16384)]
StorageUri = Annotated[str, Field(pattern=STORAGE_URI, max_length=1024), WITHIN_ITSELF]


class Spec(BaseModel):
    """Frozen base of specs and statuses: no value is converted to another type, and unknown fields are errors.

    Fields are camelCase in manifests, snake_case in Python. The string below a field, or `description`, describes it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, alias_generator=to_camel, populate_by_name=True
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, document: Any) -> Any:
        return _without_nulls(document, fields_of(cls).keys() - _null_is_a_value(cls))


def null_is_unset(*members: type[Spec]) -> BeforeValidator:
    """Return a validator for a union of types: a null field counts as unset, even one that only another member has."""
    fields = frozenset[str]().union(*map(fields_of, members))
    values = {tag_of(member): _null_is_a_value(member) for member in members}

    def drop(document: Any) -> Any:
        tag = document.get("name") if isinstance(document, Mapping) else None
        return _without_nulls(document, fields - values.get(str(tag), frozenset()))

    return BeforeValidator(drop)


def tag_of(model: type[BaseModel]) -> str:
    """Return the tag by which a union of pydantic models selects this model; empty if the model has none.

    A tag is the class variable `form` or, without it, the only value that the field `name` allows.
    """
    if form := getattr(model, "form", ""):
        return str(form)
    name = model.model_fields.get("name")
    return str(next(iter(get_args(name.annotation)), "")) if name else ""


def form_of(document: object, forms: Mapping[str, str], usual: str) -> str:
    """Return the form (union member) of a document: by the first key of `forms` that the document has, else `usual`."""
    if not isinstance(document, Mapping):
        return str(getattr(document, "form", usual))
    return next((form for key, form in forms.items() if key in document), usual)


@cache
def fields_of(model: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Return the fields of a pydantic model by their names in a document."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


@cache
def _null_is_a_value(model: type[BaseModel]) -> frozenset[str]:
    """Return the names of a pydantic model's fields in which null is a value, since their default is not null."""
    return frozenset(
        name
        for name, field in fields_of(model).items()
        if type(None) in get_args(field.annotation) and not (field.default is None or field.is_required())
    )


def _without_nulls(document: Any, fields: Collection[str]) -> Any:
    """Return a mapping without the given fields where they are null, as a cluster's API server keeps it."""
    if not isinstance(document, Mapping):
        return document
    return {name: value for name, value in document.items() if value is not None or name not in fields}
