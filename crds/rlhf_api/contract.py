"""The base of every typed value in the contract, and the forms of text that several of them share."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
IDENTIFIER = r"^[A-Za-z_][A-Za-z0-9_]*$"
ENTRYPOINT = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
TIMESTAMP = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[-+]\d\d:\d\d)$"
MODEL_URI = r"^(hf|job|package|file)://.+$"
DATA_URI = r"^(hf|package|file)://.+$"
SERVICE_URL = r"^https?://[^\s/].*$"
STORAGE_URI = r"^(file:///|s3://[^/]|gs://[^/]).*$"

FORMS = {
    DNS_LABEL: "lower-case letters, digits and '-', with a letter or digit at both ends",
    IDENTIFIER: "letters, digits and '_', not starting with a digit",
    ENTRYPOINT: "module.path:function",
    TIMESTAMP: "an RFC 3339 time such as 2026-01-31T12:00:00Z",
    MODEL_URI: "a URI that starts with hf://, job://, package:// or file://",
    DATA_URI: "a URI that starts with hf://, package:// or file://",
    SERVICE_URL: "an http or https URL",
    STORAGE_URI: "file:///folder, s3://bucket or gs://bucket",
}
"""What a user is told about each pattern."""

Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=DNS_LABEL, max_length=52)]


class Spec(BaseModel):
    """A frozen value, camelCase outside and snake_case inside, that converts nothing and ignores nothing."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        alias_generator=to_camel,
        populate_by_name=True,
    )
