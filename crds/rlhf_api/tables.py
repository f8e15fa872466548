"""Reader of the tables that packages keep as YAML files beside their modules."""

from importlib import resources
from typing import TypeVar

from pydantic import TypeAdapter

from rlhf_api import kubectl_yaml

T = TypeVar("T")


def read_table(package: str, file: str, kind: type[T]) -> T:
    """Return the table in a YAML file of a package, as a value of type `kind`.

    Raises SpecError for a file that is no YAML, and pydantic's ValidationError for a table that does not fit the type.
    """
    text = resources.files(package).joinpath(file).read_text(encoding="utf-8")
    return TypeAdapter(kind).validate_python(kubectl_yaml.read_one(text, f"{package}/{file}: "))
