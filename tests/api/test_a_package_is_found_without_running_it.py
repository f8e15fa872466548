"""Where `package://` leads: the folder of an installed package, none of whose code runs."""

import sys
import zipfile
from pathlib import Path

import pytest

from rlhf_api.packages import in_package
from tests.each import each_case


def test_no_code_of_the_package_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ends_python"
    package.mkdir()
    for name in ("__init__.py", "__main__.py"):
        (package / name).write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    assert in_package("package://ends_python/model/config.json") == package / "model" / "config.json"
    assert in_package("package://ends_python") == package
    with pytest.raises(LookupError, match=r"no Python package named 'ends_python.__main__' is installed"):
        in_package("package://ends_python.__main__/x")
    assert not [name for name in sys.modules if name.startswith("ends_python")]


@each_case("name", ["no_such_package", "__main__", "json.tool", "sys", "colorsys", "", ".", "a-b"])
def test_what_is_no_package_is_a_sentence(name: str) -> None:
    with pytest.raises(LookupError, match=f"no Python package named '{name}' is installed"):
        in_package(f"package://{name}/x")


def test_a_package_in_an_archive_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.writestr("packed_package/__init__.py", "")
    monkeypatch.syspath_prepend(tmp_path / "packed.zip")
    with pytest.raises(LookupError, match="'packed_package' is not unpacked on disk"):
        in_package("package://packed_package/x")
