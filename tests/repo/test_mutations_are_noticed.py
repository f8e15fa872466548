"""What tests/mutations.py changes is where it says; that tests notice it is shown by `make test-full`."""

from pathlib import Path

import pytest

from tests import mutations
from tests.each import each_case
from tests.mutations import MUTATIONS, ROOT, Mutation, copied, unnoticed


@each_case("mutation", MUTATIONS, ids=str)
def test_a_change_can_be_made_and_its_test_is_there(mutation: Mutation) -> None:
    assert mutation.mutated(ROOT) != (ROOT / mutation.file).read_text()
    assert (ROOT / mutation.test.partition("::")[0]).is_file()


@pytest.mark.parametrize("text", ["", "x = 1\nx = 1\n"])
def test_a_text_that_is_not_there_once_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "file.py").write_text(text)
    with pytest.raises(ValueError, match="times, not once"):
        Mutation("file.py", "x = 1", "x = 2", "test.py").mutated(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_change_makes_its_test_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["mutations"])
    assert mutations.main() == 0


@pytest.mark.slow
def test_a_change_that_nobody_notices_is_told() -> None:
    harmless = Mutation("tests/mutations.py", "NOTICED = 1\n", "NOTICED = 1  # one\n", "tests/repo/test_budget.py")
    with copied() as root:
        assert "test_budget.py ends with 0" in unnoticed(root, harmless)
