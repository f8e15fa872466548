"""A reward is a model, function, verifier, service, judge, or a weighted sum of these; only a model takes slots."""

import pytest

from rlhf_api.files import dump, load
from rlhf_api.problems import SpecError
from rlhf_api.spec.job_spec import RewardSum
from tests.each import each_case

PPO, SFT, REWARD = "helpful-ppo", "helpful-sft", "helpful-reward"
MODEL_A, MODEL_B = (f"{{name: {name}, reward: {{uri: job://helpful-reward}}}}" for name in "ab")
FUNCTION = "{name: rule, weight: -0.5, reward: {entrypoint: a.b:c, arguments: {deep: [1, {x: y}]}}}"
JUDGE = "{url: 'https://host/v1', model: m"
PAIR = "{response_a} or {response_b}?"
POOLS = "{mode: Manual, pools: [{name: all, models: [actor, critic, reference, reward], slotsPerNode: 1}]}"
SLOW_EVALUATION = "{data: {uri: hf://x}, functions: [{name: f, entrypoint: a:b, timeoutSeconds: 1900}]}"

FORMS = {
    "a model": ("{uri: job://helpful-reward}", True),
    "a function": ("{entrypoint: a.b:c, arguments: {length: 3}, timeoutSeconds: 2}", False),
    "a service": ("{url: https://host:8000/score, concurrency: 2, tokenVariable: SCORER_TOKEN}", False),
    "a verifier": ("{verifier: {name: Math, answerKey: gold}}", False),
    "a judge": (f"{{judge: {JUDGE}, prompt: 'Rate {{prompt}} {{response}}'}}}}", False),
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
        "holds a name, a password or a query; a secret is given by an environment variable",
    ),
    "two models in a sum": (
        [f"{PPO}:models.reward={{sum: [{MODEL_A}, {MODEL_B}]}}"],
        f"{PPO}: spec.models.reward.sum.1.reward",
        "is the second model of the sum",
    ),
    "a sum in a sum": (
        [f"{PPO}:models.reward={{sum: [{{name: a, reward: {{sum: [{FUNCTION}]}}}}]}}"],
        f"{PPO}: spec.models.reward.sum.0.reward",
        "is a sum; a sum holds models, functions, verifiers, services and judges, and no sum",
    ),
    "a part that counts for nothing": (
        [f"{PPO}:models.reward={{sum: [{{name: a, weight: 0, reward: {{entrypoint: a:b}}}}]}}"],
        f"{PPO}: spec.models.reward.sum.0.weight",
        "is 0, expected another number",
    ),
    "a function as cost": (
        [f"{PPO}:algorithm.name=SafeRLHF", f"{PPO}:models.cost={{entrypoint: a:b}}"],
        f"{PPO}: spec.models.cost",
        "is a function, expected a model, which has a uri",
    ),
    "a function in a pool": (
        [
            f"{PPO}:models.reward={{entrypoint: a:b}}",
            f"{PPO}:placement={POOLS}",
        ],
        f"{PPO}: spec.placement.pools.0.models",
        "the reward is a function, and only models live in pools",
    ),
    "an extract without a group": (
        [f"{PPO}:models.reward={{verifier: {{name: Math, answerExtract: '####.*'}}}}"],
        f"{PPO}: spec.models.reward.verifier.answerExtract",
        "has no group, expected one in parentheses around what is compared",
    ),
    "a pattern that is none": (
        [f"{PPO}:models.reward={{verifier: {{name: Regex, pattern: '(a'}}}}"],
        f"{PPO}: spec.models.reward.verifier.pattern",
        "is no regular expression: missing ), unterminated subpattern at position 0",
    ),
    "a judge that sees no response": (
        [f"{PPO}:models.reward={{judge: {JUDGE}, prompt: 'Rate {{prompt}}'}}}}"],
        f"{PPO}: spec.models.reward.judge.prompt",
        "expected {response}, to be given a number, or {response_a} and {response_b}, to be compared",
    ),
    "a judge that sees one of two responses": (
        [f"{PPO}:models.reward={{judge: {JUDGE}, prompt: 'Is {{response_a}} better?'}}}}"],
        f"{PPO}: spec.models.reward.judge.prompt",
        "expected {response}, to be given a number, or {response_a} and {response_b}, to be compared",
    ),
    "a judge's range that is none": (
        [f"{PPO}:models.reward={{judge: {JUDGE}, prompt: '{{response}}', minimum: 5, maximum: 5}}}}"],
        f"{PPO}: spec.models.reward.judge.maximum",
        "is not more than minimum",
    ),
    "a reference for a judge that does not compare": (
        [f"{PPO}:models.reward={{judge: {JUDGE}, prompt: '{{response}}', referenceKey: chosen}}}}"],
        f"{PPO}: spec.models.reward.judge.referenceKey",
        "is for a prompt with {response_a} and {response_b}",
    ),
    "a judge without a group to compare": (
        [
            f"{PPO}:models.reward={{judge: {JUDGE}, prompt: '{PAIR}'}}}}",
            f"{PPO}:rollout.samplesPerPrompt=1",
            f"{PPO}:training.miniBatchSize=8",
        ],
        f"{PPO}: spec.models.reward.judge.prompt",
        "compares the responses to a prompt, but rollout.samplesPerPrompt is 1",
    ),
    "a judge in a sum without a group to compare": (
        [
            f"{PPO}:models.reward={{sum: [{{name: a, reward: {{judge: {JUDGE}, prompt: '{PAIR}'}}}}}}]}}",
            f"{PPO}:rollout.samplesPerPrompt=1",
            f"{PPO}:training.miniBatchSize=8",
        ],
        f"{PPO}: spec.models.reward.sum.0.reward.judge.prompt",
        "compares the responses to a prompt, but rollout.samplesPerPrompt is 1",
    ),
    "a field of a judge's request that the trainer writes": (
        [f"{PPO}:models.reward={{judge: {JUDGE}, prompt: '{{response}}', arguments: {{stream: true}}}}}}"],
        f"{PPO}: spec.models.reward.judge.arguments.stream",
        "is written by the trainer",
    ),
    "a judge's token in its URL": (
        [f"{PPO}:models.reward={{judge: {{url: 'https://h?key=1', model: m, prompt: '{{response}}'}}}}"],
        f"{PPO}: spec.models.reward.judge.url",
        "holds a name, a password or a query; a secret is given by an environment variable",
    ),
    "a judge that may take longer than a call": (
        [f"{PPO}:models.reward={{judge: {JUDGE}, prompt: '{{response}}', timeoutSeconds: 1800}}}}"],
        f"{PPO}: spec.models.reward.judge.timeoutSeconds",
        "is 1800, expected less than training.callDeadlineSeconds (1800)",
    ),
    "an argument that is no number": (
        [f"{PPO}:models.reward={{entrypoint: a:b, arguments: {{z: [1, {{k: .nan}}]}}}}"],
        f"{PPO}: spec.models.reward.arguments.z.1.k",
        "is nan (a number), expected a finite number",
    ),
    "an argument that every function gets": (
        [f"{PPO}:models.reward={{entrypoint: a:b, arguments: {{prompts: 1}}}}"],
        f"{PPO}: spec.models.reward.arguments.prompts",
        "is given to every function; choose another name",
    ),
    "an argument that is no name": (
        [f"{PPO}:models.reward={{entrypoint: a:b, arguments: {{x-y: 2}}}}"],
        f"{PPO}: spec.models.reward.arguments.x-y",
        "is \"x-y\" (text), expected letters, digits and '_', not starting with a digit",
    ),
    "a function that may take longer than a call": (
        [f"{PPO}:models.reward={{sum: [{{name: a, reward: {{entrypoint: a:b, timeoutSeconds: 1800}}}}]}}"],
        f"{PPO}: spec.models.reward.sum.0.reward.timeoutSeconds",
        "is 1800, expected less than training.callDeadlineSeconds (1800)",
    ),
    "a service that may take longer than a call": (
        [f"{PPO}:models.reward={{url: 'http://host', timeoutSeconds: 61}}", f"{PPO}:training.callDeadlineSeconds=60"],
        f"{PPO}: spec.models.reward.timeoutSeconds",
        "is 61, expected less than training.callDeadlineSeconds (60)",
    ),
    "an evaluation function that may take longer than a call": (
        [
            f"{PPO}:evaluation={SLOW_EVALUATION}",
        ],
        f"{PPO}: spec.evaluation.functions.0.timeoutSeconds",
        "is 1900, expected less than training.callDeadlineSeconds (1800)",
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


@each_case(("reward", "has_model"), FORMS.values(), ids=FORMS)
def test_a_job_has_a_reward_model_only_if_its_reward_holds_one(chain: str, reward: str, has_model: bool) -> None:
    job = load(chain, [f"{PPO}:models.reward={reward}"])[-1]
    assert ("reward" in job.models()) is has_model
    assert ("reward" in job.spec.models.by_role()) is has_model


@each_case(("reward", "has_model"), FORMS.values(), ids=FORMS)
def test_a_reward_is_written_and_read_back(chain: str, reward: str, has_model: bool) -> None:
    jobs = load(chain, [f"{PPO}:models.reward={reward}"])
    assert load("---\n".join(map(dump, jobs))) == jobs
    assert has_model or "job://helpful-reward" not in str(jobs[-1].spec.models.reward)


def test_a_sum_keeps_weights_and_order(chain: str) -> None:
    reward = load(chain, [f"{PPO}:models.reward={{sum: [{FUNCTION}, {MODEL_A}]}}"])[-1].spec.models.reward
    assert isinstance(reward, RewardSum)
    assert [(term.name, term.weight) for term in reward.sum] == [("rule", -0.5), ("a", 1.0)]


@each_case(("overrides", "path", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_names_its_path(chain: str, overrides: list[str], path: str, message: str) -> None:
    with pytest.raises(SpecError) as raised:
        load(chain, overrides)
    assert [(problem.path, problem.message) for problem in raised.value.problems] == [(path, message)]
    assert "secret@" not in str(raised.value)


@each_case(
    "url",
    ["http://host:abc/x", "http://[::1/x", "http://:8000", "http://ho st/x", "http://host/x y", "http://host:70000"],
)
def test_a_url_that_no_client_can_read_is_refused(chain: str, url: str) -> None:
    with pytest.raises(SpecError) as raised:
        load(chain, [f"{PPO}:models.reward={{url: '{url}'}}"])
    assert str(raised.value) == f'{PPO}: spec.models.reward.url: is "{url}" (text), expected an http or https URL'


@pytest.mark.parametrize("url", ["http://[::1]:8000/x", "https://host", "http://10.0.0.1:80/a/b%20c"])
def test_a_url_is_accepted(chain: str, url: str) -> None:
    load(chain, [f"{PPO}:models.reward={{url: '{url}'}}"])


def test_a_part_may_be_named_mean(chain: str) -> None:
    load(chain, [f"{PPO}:models.reward={{sum: [{{name: mean, reward: {{entrypoint: a:b}}}}]}}"])


def test_a_reward_that_is_no_model_needs_no_pool(chain: str) -> None:
    pools = "placement={mode: Manual, pools: [{name: all, models: [actor, critic, reference], slotsPerNode: 1}]}"
    load(chain, [f"{PPO}:models.reward={{entrypoint: a:b}}", f"{PPO}:{pools}"])
    with pytest.raises(SpecError, match="reward is in no pools"):
        load(chain, [f"{PPO}:{pools}"])
