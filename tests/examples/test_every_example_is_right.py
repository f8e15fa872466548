"""Every manifest under examples/ is valid beside the finished jobs of examples 01, 09 and 12."""

from functools import cache
from pathlib import Path

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_api.spec.algorithm_table import ALGORITHMS
from tests.each import each_case

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
DISTINCT = [path for path in EXAMPLES if path.stem != "22-rounds-dpo"]
"""Without the example whose jobs repeat those of others."""
FINISHED = {"helpful-sft": "SFT", "helpful-rm": "RewardModel", "arithmetic-sft": "SFT", "calculator-sft": "SFT"}
FINISHED |= {"helpful-ppo": "PPO", "safe-rlhf": "SafeRLHF"}


@cache
def jobs_of(path: Path) -> tuple[Job, ...]:
    """The jobs of an example, as many files of tests ask for them."""
    return tuple(load(path, finished=FINISHED))


@each_case("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid(path: Path) -> None:
    assert jobs_of(path)


def test_every_algorithm_has_an_example() -> None:
    shown = {type(job.spec.algorithm) for path in EXAMPLES for job in jobs_of(path)}
    assert shown == set(ALGORITHMS.values())
