"""Wrong fields do not hide broken rules, and a document with mistakes does not hide those of the others."""

import pytest

from rlhf_api import kubectl_yaml
from rlhf_api.files import load, read
from rlhf_api.problems import SpecError
from tests.api.cases import made
from tests.api.test_a_mistake_names_its_path import PPO, SFT


def problems(chain: str, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as raised:
        load(chain, list(overrides))
    return [problem.path for problem in raised.value.problems]


def test_a_wrong_field_does_not_hide_a_broken_rule(chain: str) -> None:
    found = problems(chain, f"{PPO}:training.seed=-1", f"{PPO}:training.miniBatchSize=24")
    assert found == ["helpful-ppo: spec.training.seed", "helpful-ppo: spec.training.miniBatchSize"]


def test_what_follows_from_a_wrong_field_is_not_told(chain: str) -> None:
    assert problems(chain, f"{SFT}:training.totalSteps=many") == ["helpful-sft: spec.training.totalSteps"]


def test_what_follows_from_a_broken_rule_is_not_told() -> None:
    text = kubectl_yaml.write(made("GRPO", ("rollout.agent={}", "models.reward=")))
    assert problems(text) == ["job: spec.rollout.agent"], "without the agent nothing gives a reward"


def test_a_broken_rule_is_told_once(chain: str) -> None:
    assert problems(chain, f"{PPO}:training.miniBatchSize=24") == ["helpful-ppo: spec.training.miniBatchSize"]


def test_what_is_right_of_a_document_is_read(chain: str) -> None:
    jobs, mistakes = read(chain, [f"{PPO}:training.seed=-1"])
    assert [str(mistake).partition(":")[0] for mistake in mistakes] == [PPO]
    assert {job.name: job.spec.training.seed for job in jobs}[PPO] >= 0


def test_a_job_is_tried_without_all_that_is_wrong(chain: str) -> None:
    jobs, mistakes = read(chain, [f"{PPO}:training.seed=-1", f"{PPO}:training.miniBatchSize=24"])
    assert len(mistakes) == 2
    assert PPO in [job.name for job in jobs]


def test_a_job_that_reads_a_broken_one_is_not_read(chain: str) -> None:
    jobs, mistakes = read(chain, [f"{SFT}:algorithm=nothing"])
    assert len(mistakes) == 1
    names = [job.name for job in jobs]
    assert SFT not in names
    assert PPO not in names, "it reads the model of the SFT job"
