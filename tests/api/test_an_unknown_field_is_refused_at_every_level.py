"""Wherever a mapping has fixed fields, a field that is not among them is a mistake with its path."""

from collections.abc import Iterator
from typing import Any

import pytest

from rlhf_api.files import dump, load
from rlhf_api.job import Job
from rlhf_api.kubectl_yaml import read
from rlhf_api.problems import SpecError

FULL = [
    "helpful-ppo:models.reference={uri: hf://gpt2}",
    "helpful-ppo:models.critic.optimizer={}",
    (
        "helpful-ppo:models.reward={sum: [{name: a, reward: {entrypoint: a:b}}, {name: b, reward: {url: http://c}}, "
        "{name: d, reward: {uri: job://helpful-reward}}]}"
    ),
    "helpful-ppo:evaluation={data: {uri: hf://x}, functions: [{name: rule, entrypoint: a.b:c}]}",
    (
        "helpful-ppo:placement={mode: Manual, pools: "
        "[{name: all, models: [actor, critic, reference, reward], slotsPerNode: 1}]}"
    ),
]
FREE = ("metadata.labels", "metadata.annotations")


def _mappings(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict) and path not in FREE and not path.lower().endswith("arguments"):
        yield path, node
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from _mappings(child, f"{path}.{key}".lstrip("."))


def test_an_unknown_field_is_refused_at_every_level(chain: str) -> None:
    planted = set()
    for job in load(chain, FULL):
        [document] = read(dump(job), "")
        for path, mapping in _mappings(document):
            mapping["planted"] = 1
            with pytest.raises(SpecError) as raised:
                Job.parse(document)
            del mapping["planted"]
            [problem] = raised.value.problems
            assert problem.path == f"{path}.planted".lstrip(".")
            assert problem.message.startswith("unknown field; ")
            planted.add(path)
    assert {"", "spec", "spec.algorithm.kl", "spec.placement.pools.0", "spec.evaluation.functions.0"} <= planted
    assert {f"spec.models.reward.sum.{place}{part}" for place in range(3) for part in ("", ".reward")} <= planted
    assert len(planted) > 20
