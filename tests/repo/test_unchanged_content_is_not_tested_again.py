"""`make test` leaves out the tests of the cluster for content that has passed them, and for no other."""

from pathlib import Path

import pytest

from tests.cluster import passed
from tests.cluster.settings import ROOT


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two files, on a machine on which nothing has passed."""
    (tmp_path / "operator").mkdir()
    (tmp_path / "operator" / "a.py").write_text("a")
    (tmp_path / "Dockerfile").write_text("FROM")
    monkeypatch.setattr(passed, "ROOT", tmp_path)
    monkeypatch.setattr(passed, "PASSED", tmp_path / "passed")
    monkeypatch.delenv("RLHF_CLUSTER_TESTS", raising=False)
    return tmp_path


def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `python -m tests.cluster.passed` prints on stdout."""
    monkeypatch.setattr("sys.argv", ["passed", *arguments])
    assert passed.main() == 0
    return capsys.readouterr().out.strip()


def test_content_that_has_passed_is_known_until_a_file_changes(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = told(monkeypatch, capsys)
    assert before
    told(monkeypatch, capsys, before)
    assert told(monkeypatch, capsys) == ""
    (root / "operator" / "a.py").write_text("b")
    assert told(monkeypatch, capsys) not in ("", before)
    (root / "operator" / "a.py").write_text("a")
    assert told(monkeypatch, capsys) == ""


@pytest.mark.usefixtures("root")
def test_where_tests_of_the_cluster_are_required_they_always_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = told(monkeypatch, capsys)
    told(monkeypatch, capsys, before)
    monkeypatch.setenv("RLHF_CLUSTER_TESTS", "required")
    assert told(monkeypatch, capsys) == before


def test_a_file_under_another_name_is_other_content(root: Path) -> None:
    before = passed.content()
    (root / "operator" / "a.py").rename(root / "operator" / "b.py")
    assert passed.content() != before


def test_everything_that_counts_is_there() -> None:
    assert not [place for place in passed.ABOUT if not (ROOT / place).exists()]
