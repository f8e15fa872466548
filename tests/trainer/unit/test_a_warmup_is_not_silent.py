"""A job that ends before its actor learns says so."""

import pytest

from rlhf_api.files import load
from rlhf_trainer.run.job_run import warmup_sentences
from tests.repo.tree import ROOT


@pytest.mark.parametrize(("warmup", "steps", "is_said"), [(3, 3, True), (3, 4, False), (0, 1, False)])
def test_a_job_that_only_warms_up_says_so(warmup: int, steps: int, is_said: bool) -> None:
    override = f"helpful-ppo:algorithm.criticWarmupSteps={warmup}"
    job = load(ROOT / "examples" / "01-helpful-ppo.yaml", [override])[-1]
    assert bool(warmup_sentences(job, steps)) is is_said
