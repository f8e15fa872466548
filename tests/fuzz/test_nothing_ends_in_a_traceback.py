"""Some cases of each target; `python -m tests.fuzz` tries more, and tests/README.md has the figures."""

import pytest

from tests.fuzz.targets import TARGETS, tried_in_a_folder

CASES = {"manifests": 100, "plans": 12, "settings": 40, "run_folders": 5, "rows": 8, "objects": 30}
SEED = 1


@pytest.mark.parametrize("target", TARGETS)
def test_whatever_is_damaged_ends_with_sentences(target: str) -> None:
    found = tried_in_a_folder(TARGETS[target], cases=CASES[target], seed=SEED)
    assert not found.defects, "\n".join(f"case {number}: {shown}" for number, shown in found.defects.values())
    assert len(found.outcomes) > 1, "some are refused, and some are not"
