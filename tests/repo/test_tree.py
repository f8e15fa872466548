"""The tree: plain folders, modules that say what they are, YAML that loads, contracts about modules that exist."""

import ast
import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import yaml

from tests.each import each_case
from tests.repo.tree import ROOT, product_files, tracked_files

MODULES = product_files()
YAML_FILES = [path for path in tracked_files() if path.suffix in {".yaml", ".yml"} and "templates" not in path.parts]
CONTRACTS: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]


def relative(path: Path) -> str:
    """A path as a test's id."""
    return str(path.relative_to(ROOT))


@each_case("folder", ["crds", "operator", "trainer_image", "examples"])
def test_the_folder_of_a_part_is_not_a_package(folder: str) -> None:
    """A package called operator would shadow the standard library's module."""
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


def test_each_module_says_what_it_is() -> None:
    assert not [relative(path) for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))]


def test_each_yaml_file_loads() -> None:
    documents = {relative(path): [*yaml.safe_load_all(path.read_text())] for path in YAML_FILES}
    assert not [path for path, found in documents.items() if not any(each is not None for each in found)]


def test_there_are_yaml_files() -> None:
    assert ROOT / "examples/01-helpful-ppo.yaml" in YAML_FILES


def named_modules(contract: dict[str, Any]) -> set[str]:
    """The modules of ours that a contract names, with full names."""
    floors = {name.strip() for layer in contract.get("layers", []) for name in layer.split("|")}
    inside = {f"{package}.{floor}" for package in contract.get("containers", []) for floor in floors} or floors
    named = inside | set(contract.get("source_modules", [])) | set(contract.get("forbidden_modules", []))
    return {name for name in named if name.startswith("rlhf_")}


@each_case("contract", CONTRACTS, ids=lambda contract: contract["name"])
def test_a_contract_names_modules_that_exist(contract: dict[str, Any]) -> None:
    names = named_modules(contract)
    assert names
    assert not [name for name in sorted(names) if importlib.util.find_spec(name) is None]
