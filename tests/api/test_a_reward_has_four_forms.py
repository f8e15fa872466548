"""A reward is a model, a function, a service, or a weighted sum of these; only a model takes slots."""

import pytest

from rlhf_api import SpecError, dump, load
from rlhf_api.spec import RewardSum

PPO, SFT, REWARD = "helpful-ppo", "helpful-sft", "helpful-reward"
MODEL_A, MODEL_B = (f"{{name: {name}, reward: {{uri: job://helpful-reward}}}}" for name in "ab")
FUNCTION = "{name: rule, weight: -0.5, reward: {entrypoint: a.b:c, arguments: {deep: [1, {x: y}]}}}"

FORMS = {
    "a model": ("{uri: job://helpful-reward}", True),
    "a function": ("{entrypoint: a.b:c, arguments: {length: 3}, timeoutSeconds: 2}", False),
    "a service": ("{url: https://host:8000/score, concurrency: 2, tokenVariable: SCORER_TOKEN}", False),
    "a sum with a model": (f"{{sum: [{FUNCTION}, {MODEL_A}]}}", True),
    "a sum without": (f"{{sum: [{FUNCTION}]}}", False),
}
MISTAKES = {
    "a field of another form of reward": (
        [f"{PPO}:models.reward={{entrypoint: a:b, uri: hf://x}}"],
        f"{PPO}: spec.models.reward.uri",
        "unknown field for a function; it is for a model only",
    ),
    "a reward without any form": ([f"{PPO}:models.reward={{}}"], f"{PPO}: spec.models.reward.uri", "is missing"),
    "a service that is no URL": (
        [f"{PPO}:models.reward={{url: localhost}}"],
        f"{PPO}: spec.models.reward.url",
        'is "localhost" (text), expected an http or https URL',
    ),
    "a password in a URL": (
        [f"{PPO}:models.reward={{url: 'http://me:secret@host'}}"],
        f"{PPO}: spec.models.reward.url",
        "holds a name, a password or a query; a secret is given by tokenVariable",
    ),
    "two models in a sum": (
        [f"{PPO}:models.reward={{sum: [{MODEL_A}, {MODEL_B}]}}"],
        f"{PPO}: spec.models.reward.sum.1.reward",
        "is the second model of the sum",
    ),
    "a part of a sum that takes a metric's name": (
        [f"{PPO}:models.reward={{sum: [{{name: mean, reward: {{entrypoint: a:b}}}}]}}"],
        f"{PPO}: spec.models.reward.sum.0.name",
        '"mean" is taken',
    ),
    "a sum whose model is not there": (
        [f"{PPO}:models.reward={{sum: [{{name: a, reward: {{uri: job://helpful-rewrad}}}}]}}"],
        f"{PPO}: spec.models.reward.sum.0.reward.uri",
        'no job of this file, or finished in the run folder, is named "helpful-rewrad"; did you mean helpful-reward?',
    ),
    "a sum whose model says how to train": (
        [f"{PPO}:models.reward={{sum: [{{name: a, reward: {{uri: job://helpful-reward, optimizer: {{}}}}}}]}}"],
        f"{PPO}: spec.models.reward.sum.0.reward.optimizer",
        "PPO does not train the reward",
    ),
    "a function for a reward model to be trained": (
        [f"{REWARD}:models.reward={{entrypoint: a:b}}"],
        f"{REWARD}: spec.models.reward",
        "is a function; RewardModel trains a model, which has a uri",
    ),
    "a function for an algorithm without a reward": (
        [f"{SFT}:models.reward={{entrypoint: a:b}}"],
        f"{SFT}: spec.models.reward",
        "SFT has no reward",
    ),
}


@pytest.mark.parametrize(("reward", "has_model"), FORMS.values(), ids=FORMS)
def test_a_job_has_a_reward_model_only_if_its_reward_holds_one(chain: str, reward: str, has_model: bool) -> None:
    job = load(chain, [f"{PPO}:models.reward={reward}"])[-1]
    assert ("reward" in job.models()) is has_model
    assert ("reward" in job.spec.models.given()) is has_model


@pytest.mark.parametrize(("reward", "has_model"), FORMS.values(), ids=FORMS)
def test_a_reward_is_written_and_read_back(chain: str, reward: str, has_model: bool) -> None:
    jobs = load(chain, [f"{PPO}:models.reward={reward}"])
    assert load("---\n".join(map(dump, jobs))) == jobs
    assert has_model or "job://helpful-reward" not in str(jobs[-1].spec.models.reward)


def test_a_sum_keeps_weights_and_order(chain: str) -> None:
    reward = load(chain, [f"{PPO}:models.reward={{sum: [{FUNCTION}, {MODEL_A}]}}"])[-1].spec.models.reward
    assert isinstance(reward, RewardSum)
    assert [(term.name, term.weight) for term in reward.sum] == [("rule", -0.5), ("a", 1.0)]


@pytest.mark.parametrize(("overrides", "path", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_names_its_path(chain: str, overrides: list[str], path: str, message: str) -> None:
    with pytest.raises(SpecError) as raised:
        load(chain, overrides)
    assert [(problem.path, problem.message) for problem in raised.value.problems] == [(path, message)]
    assert "secret@" not in str(raised.value)


def test_a_reward_that_is_no_model_needs_no_pool(chain: str) -> None:
    pools = "placement={mode: Manual, pools: [{name: all, models: [actor, critic, reference], slotsPerNode: 1}]}"
    load(chain, [f"{PPO}:models.reward={{entrypoint: a:b}}", f"{PPO}:{pools}"])
    with pytest.raises(SpecError, match="reward is in no pools"):
        load(chain, [f"{PPO}:{pools}"])
