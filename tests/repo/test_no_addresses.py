"""No file names a package registry or a folder of one particular machine."""

import re
from pathlib import Path

import pytest

from tests.each import each_case
from tests.repo.tree import ROOT, tracked_files

DOT, SLASH = r"\.", "/"
HOSTS = [
    DOT.join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("wheels", "vllm", "ai"),
        ("pypi", "nvidia", "com"),
        ("pypi", "tuna"),
    )
]
FOLDERS = [SLASH + name + SLASH for name in ("work", "root", "home", "Users")]
FORBIDDEN = re.compile("|".join([*HOSTS, *(rf"(?<![\w.$}}~-]){folder}\w" for folder in FOLDERS)]))


def findings(text: str) -> list[str]:
    """The addresses in a text."""
    return [match.group() for match in FORBIDDEN.finditer(text)]


def text_of(path: Path) -> str:
    """The text of a file; empty for a binary one."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def test_no_file_names_a_registry_or_a_folder_of_one_machine() -> None:
    files = tracked_files()
    assert ROOT / "pyproject.toml" in files
    assert not [f"{path.relative_to(ROOT)}: {found}" for path in files for found in findings(text_of(path))]


@pytest.mark.parametrize(
    "text", ["--index-url https://" + "pypi" + ".org/simple", "cd " + "/ro" + "ot/x", '"' + "/wo" + 'rk/x"']
)
def test_an_address_is_found(text: str) -> None:
    assert findings(text)


@each_case("text", ["a/work/b", "the root/of it", "$HOME/work/x", "pyproject.org"])
def test_other_text_is_not(text: str) -> None:
    assert not findings(text)
