"""A table in a package's YAML file fits its type, or the error names the place; nothing of a file is left out."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from pydantic import ValidationError

from rlhf_api.problems import SpecError
from rlhf_api.tables import read_table
from tests.each import each_case
from tests.repo.tree import ROOT, tracked_files
from tests.repo.walk import SOURCES

PRODUCT = [path for path in tracked_files() if path.relative_to(ROOT).parts[0] in SOURCES]
TABLES = [path for path in PRODUCT if path.suffix == ".yaml" and (path.parent / "__init__.py").is_file()]


class Fruit(NamedTuple):
    name: str
    grams: float
    colour: str = ""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a package `fruit_shop`."""
    folder = tmp_path_factory.mktemp("packages") / "fruit_shop"
    folder.mkdir()
    (folder / "__init__.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder.parent)
        yield folder


def read(shop: Path, text: str) -> tuple[Fruit, ...]:
    (shop / "fruit.yaml").write_text(text)
    return read_table("fruit_shop", "fruit.yaml", tuple[Fruit, ...])


def test_rows_are_mappings_or_lists(shop: Path) -> None:
    assert read(shop, "- {name: fig, grams: 50}\n- [plum, 30.5, blue]\n") == (
        Fruit("fig", 50),
        Fruit("plum", 30.5, "blue"),
    )


@each_case(
    ("text", "place"),
    [
        ("- {name: fig, grams: 50, color: green}", "0.color"),
        ("- {name: fig}", "0.grams"),
        ("- [fig, heavy]", "0.1"),
        ("- [no, 50]", "0.0"),
    ],
)
def test_what_does_not_fit_is_an_error(shop: Path, text: str, place: str) -> None:
    with pytest.raises(ValidationError) as error:
        read(shop, text)
    assert ".".join(map(str, error.value.errors()[0]["loc"])) == place


def test_a_repeated_key_is_an_error(shop: Path) -> None:
    with pytest.raises(SpecError, match=r'fruit_shop/fruit.yaml: line 2: cannot be read: "name" is given twice'):
        read(shop, "- name: fig\n  name: plum\n  grams: 50\n")


@each_case("path", TABLES, ids=lambda path: path.name)
def test_each_yaml_file_of_a_package_is_read_by_it(path: Path) -> None:
    modules = "\n".join(module.read_text() for module in path.parent.glob("*.py"))
    assert re.search(rf'read_table\(__package__, "{re.escape(path.name)}"', modules)


def test_the_packages_have_tables() -> None:
    assert {"foreign_words.yaml", "known_models.yaml"} <= {path.name for path in TABLES}
