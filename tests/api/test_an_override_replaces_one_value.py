"""`--set` changes what it names, in all documents or in one."""

from typing import Any

from rlhf_api.files import load
from rlhf_api.job import Job
from tests.each import each_case

POOLS = "helpful-sft:placement={mode: Manual, pools: [{name: a, models: [actor], slotsPerNode: 2}]}"


def _by_name(text: str, *overrides: str) -> dict[str, dict[str, Any]]:
    return {job.name: job.model_dump(by_alias=True) for job in load(text, overrides)}


def _at(document: Any, path: str) -> Any:
    for part in path.split("."):
        document = document[int(part) if part.isdecimal() else part]
    return document


# sentence -> overrides, job, path, value
OVERRIDES: dict[str, tuple[list[str], str, str, object]] = {
    "a path from the top": (["spec.training.seed=7"], "helpful-sft", "spec.training.seed", 7),
    "a path inside the spec": (["training.seed=7"], "helpful-ppo", "spec.training.seed", 7),
    "one document": (["helpful-sft:training.seed=7"], "helpful-sft", "spec.training.seed", 7),
    "a document that is not named": (["helpful-sft:training.seed=7"], "helpful-ppo", "spec.training.seed", 0),
    "the last of two": (["training.seed=7", "training.seed=8"], "helpful-sft", "spec.training.seed", 8),
    "a parent that was left out": (["resources.device=CPU"], "helpful-ppo", "spec.resources.device", "CPU"),
    "an entry of a list": ([POOLS, "spec.placement.pools.0.nodes=3"], "helpful-sft", "spec.placement.pools.0.nodes", 3),
    "a flow mapping": (["resources={nodes: 2}"], "helpful-ppo", "spec.resources.nodes", 2),
    "a value with an equals sign": (["data.train.split='a=b:c'"], "helpful-ppo", "spec.data.train.split", "a=b:c"),
    "the metadata": (["metadata.namespace=team"], "helpful-sft", "metadata.namespace", "team"),
    "null": (["helpful-ppo:algorithm.valueClipRange=null"], "helpful-ppo", "spec.algorithm.valueClipRange", None),
    "a number as kubectl reads it": (
        ["helpful-ppo:models.actor.optimizer.learningRate=3e-7"],
        "helpful-ppo",
        "spec.models.actor.optimizer.learningRate",
        3e-7,
    ),
}


@each_case(("overrides", "job", "path", "value"), OVERRIDES.values(), ids=OVERRIDES)
def test_an_override_replaces_one_value(chain: str, overrides: list[str], job: str, path: str, value: object) -> None:
    assert _at(_by_name(chain, *overrides)[job], path) == value


def test_an_override_leaves_an_alias_of_the_same_mapping_alone(chain: str) -> None:
    text = chain.replace('critic: {uri: "job://helpful-reward"}', 'critic: &scorer {uri: "job://helpful-reward"}')
    text = text.replace('reward: {uri: "job://helpful-reward"}', "reward: *scorer", 1)
    ppo = _by_name(text, "helpful-ppo:models.critic.gradientCheckpointing=true")["helpful-ppo"]
    assert _at(ppo, "spec.models.critic.gradientCheckpointing") is True
    assert _at(ppo, "spec.models.reward.gradientCheckpointing") is None


def test_without_overrides_nothing_changes(chain: str) -> None:
    assert all(isinstance(job, Job) for job in load(chain))
    assert load(chain, []) == load(chain)
