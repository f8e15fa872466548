"""The chart of the last release, as it was packed, and fields and values of the releases before."""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
(CHART,) = FOLDER.glob("rlhf-operator-*.tgz")
LEFT_FIELDS = yaml.safe_load((FOLDER / "left_fields.yaml").read_text())


def files() -> dict[str, bytes]:
    """Each file of the chart by its path in the chart's folder."""
    with tarfile.open(CHART) as packed:
        found = {each.name.partition("/")[2]: packed.extractfile(each) for each in packed if each.isfile()}
        return {name: content.read() for name, content in found.items() if content}


def definition(*, left: bool = True) -> dict[str, Any]:
    """The CRD of the last release, with the fields that left before it or without."""
    document: dict[str, Any] = yaml.load(files()["files/rlhfjobs.yaml"], yaml.CSafeLoader)
    schema = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for field in LEFT_FIELDS if left else ():
        *above, last = field["path"].split(".")
        home = schema
        for name in above:
            home = home["properties"][name]
        home["properties"][last] = field["schema"]
    return document


def fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field below a schema, by its path."""
    for name, each in schema.get("properties", {}).items():
        yield f"{path}.{name}", each
        yield from fields(each, f"{path}.{name}")
    if "items" in schema:
        yield from fields(schema["items"], f"{path}[]")
