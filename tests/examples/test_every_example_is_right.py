"""Every manifest under examples/ is valid beside the finished jobs of examples 01 and 12."""

from pathlib import Path

import pytest

from rlhf_api.files import load
from rlhf_api.spec.algorithm_table import ALGORITHMS

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
FINISHED = {"helpful-sft": "SFT", "helpful-rm": "RewardModel", "arithmetic-sft": "SFT", "calculator-sft": "SFT"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid(path: Path) -> None:
    assert load(path, finished=FINISHED)


def test_every_algorithm_has_an_example() -> None:
    shown = {type(job.spec.algorithm) for path in EXAMPLES for job in load(path, finished=FINISHED)}
    assert shown == set(ALGORITHMS.values())
