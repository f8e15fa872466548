"""The contract knows the package of the algorithms by the installed metadata of this project, not by its name."""

import sys
from importlib.metadata import EntryPoints, distributions
from pathlib import Path

import pytest

from rlhf_api.spec import algorithm_table
from rlhf_api.spec.algorithm_table import ALGORITHMS, algorithm_packages
from tests.repo.tree import ROOT


def test_the_entry_point_names_the_trainers_package() -> None:
    assert [package.__name__ for package in algorithm_packages()] == ["rlhf_trainer.algorithms"]
    assert {each.__module__.rpartition(".")[0] for each in ALGORITHMS.values()} == {"rlhf_trainer.algorithms"}


class Older:
    entry_points = EntryPoints()


@pytest.mark.parametrize("installed", [[], [Older()]])
def test_metadata_without_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, installed: list[Older]) -> None:
    monkeypatch.setattr(algorithm_table, "distributions", lambda name: installed)
    with pytest.raises(
        ModuleNotFoundError, match=r"^the package rlhf-operator is not installed, .*: run `make install`$"
    ):
        algorithm_packages()


def test_an_older_installation_beside_it_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [Older(), *distributions(name=algorithm_table.PROJECT)]
    monkeypatch.setattr(algorithm_table, "distributions", lambda name: both)
    assert [package.__name__ for package in algorithm_packages()] == ["rlhf_trainer.algorithms"]


def test_a_package_elsewhere_is_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    about = tmp_path / "rlhf_operator-9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rlhf-operator\nVersion: 9\n")
    (about / "entry_points.txt").write_text("[rlhf.algorithm_packages]\nmine = json\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert [package.__name__ for package in algorithm_packages()] == ["json"]


def test_the_contract_names_no_package_above_it() -> None:
    above = ("rlhf_trainer.", "rlhf_operator.", "rlhf_mapper.")
    code = [line for path in sorted((ROOT / "crds").rglob("*.py")) for line in path.read_text().splitlines()]
    assert not [line for line in code if 'import_module("' in line or any(f'"{name}' in line for name in above)]
