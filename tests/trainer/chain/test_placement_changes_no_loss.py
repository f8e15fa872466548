"""The same steps of PPO on one pool of two slots and cut otherwise, and of SafeRLHF on one pool and on two.

Two ranks or one: sums are taken in another order, so the tolerance is 1e-4 relative, 1e-5 absolute, over 3 steps.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlhf_trainer.algorithms.ppo import PPO
from tests.trainer.chain.conftest import (
    LEFT,
    MANIFEST,
    RIGHT,
    ROOT,
    SHORT,
    only_ppo_left,
    records,
    rlhf,
)
from tests.trainer.tiny import save_tiny

COMPARED = ("loss/policy", "loss/value", "reward/mean", "kl/reference", "entropy", "response_length/mean")
SAFE = (ROOT / "examples" / "09-safe-rlhf.yaml").read_text().split("---\n")[1]


def require_same(two: list[dict[str, Any]], one: list[dict[str, Any]], *more: str) -> None:
    for apart, together in zip(two, one, strict=True):
        for name in (*COMPARED, *more):
            assert apart[name] == pytest.approx(together[name], rel=1e-4, abs=1e-5), (together["step"], name)
        assert apart["bytes/controller"] == 0


CUT = (
    "--set=helpful-ppo:models.actor.parallelism.tensor=2",
    "--set=helpful-ppo:rollout.tensorParallel=1",
    "--set=helpful-ppo:models.critic.parallelism.pipeline=2",
    "--set=helpful-ppo:models.reference.parallelism.replicas=2",
)
CUT_IN_FOUR = (
    "--set=helpful-ppo:resources.slotsPerNode=4",
    "--set=helpful-ppo:models.actor.parallelism.pipeline=2",
    "--set=helpful-ppo:models.actor.parallelism.tensor=2",
    "--set=helpful-ppo:rollout.tensorParallel=2",
)


@dataclass(frozen=True)
class Bytes:
    """Of the float32 weights of the actor."""

    vocabulary: int
    linear: int
    norms: int

    @classmethod
    def of(cls, model: Path) -> Bytes:
        weights = load_file(str(model / "model.safetensors"))
        vocabulary = weights.pop("model.embed_tokens.weight").nbytes
        linear = sum(weight.nbytes for weight in weights.values() if weight.dim() > 1)
        return cls(vocabulary, linear, sum(weight.nbytes for weight in weights.values()) - linear)


LACKING: dict[str, tuple[tuple[str, ...], str, Callable[[Bytes], int]]] = {
    # each of two ranks lacks a half of what is cut
    "1-2-1 to 1-1": (CUT, "actor 1-2-1, critic 2-1-1, reference", lambda size: size.vocabulary + size.linear),
    # each of four lacks the other stage: a quarter of the linear weights, and its norms; both have the tied embedding
    "2-2-1 to 1-2": (CUT_IN_FOUR, "4 CPU slots (actor 2-2-1, critic", lambda size: size.linear + 2 * size.norms),
}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["1-2-1 to 1-1", "2-2-1 to 1-2"])
def test_p_t_d_gives_the_losses_of_data_parallelism(chain: tuple[Path, str], tmp_path: Path, sizes: str) -> None:
    """Each new policy reaches the generator, which is cut otherwise, and the ranks get what they lack and no more."""
    options, told, lacking = LACKING[sizes]
    output = only_ppo_left(chain, tmp_path / "run")
    done = rlhf("run", MANIFEST, f"--output={output}", *SHORT, *options)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout
    cut = records(output / "helpful-ppo")
    require_same(cut, records(chain[0] / "helpful-ppo"))
    moved = lacking(Bytes.of(output / "helpful-ppo" / "model"))
    assert [record["bytes/reshard"] for record in cut] == [0, moved, moved], "the evaluation made the first generator"
    for record in cut:
        assert record["kl/rollout"] < 1e-9
        assert record["idle_bytes/generator"] < record["idle_bytes/actor"]


@pytest.mark.slow
def test_an_own_generating_pool_gives_the_actors_losses(chain: tuple[Path, str], tmp_path: Path) -> None:
    """A pool of two tensor-parallel ranks trains, and sends the whole model to the generator in the other one.

    Rows are scored as they end.
    """
    train = "{name: train, models: [actor, critic, reference, reward], slotsPerNode: 2}"
    pools = f"[{train}, {{name: writers, models: [rollout], slotsPerNode: 1}}]"
    output = only_ppo_left(chain, tmp_path / "run")
    placement = (f"--set=helpful-ppo:placement={{mode: Manual, pools: {pools}}}", CUT[0])
    streams = "--set=helpful-ppo:rollout.stream=true"
    done = rlhf("run", MANIFEST, f"--output={output}", *SHORT, "--set=helpful-ppo:resources=", *placement, streams)
    assert done.returncode == 0, done.stderr
    assert "1 CPU slot (rollout)" in done.stdout
    apart = records(output / "helpful-ppo")
    require_same(apart, records(chain[0] / "helpful-ppo"))
    size = Bytes.of(output / "helpful-ppo" / "model")
    moved = size.vocabulary + size.linear + size.norms
    assert [record["bytes/reshard"] for record in apart] == [0, moved, moved], "the evaluation made the first generator"
    assert all(record["kl/rollout"] < 1e-9 and record["staleness"] == 0 for record in apart)


@pytest.mark.slow
def test_safe_rlhf_has_the_same_losses_on_one_pool_and_on_two(chain: tuple[Path, str], tmp_path: Path) -> None:
    manifest = tmp_path / "safe.yaml"
    manifest.write_text(SAFE)
    options = [
        f"--set=models.cost.uri=file://{save_tiny(tmp_path / 'cost', seed=5, labels=1)}",
        "--set=training.totalSteps=3",
        "--set=evaluation=",
    ]
    right = RIGHT.replace("critic,", "critic, cost,")
    pools = f"[{LEFT}, slotsPerNode: 2}}, {right}, slotsPerNode: 1}}]"
    placements = {"together": [], "apart": ["--set=placement.mode=Manual", f"--set=placement.pools={pools}"]}
    found = {}
    for name, placement in placements.items():
        output = only_ppo_left(chain, tmp_path / name)
        done = rlhf("run", manifest, f"--output={output}", *options, *placement)
        assert done.returncode == 0, done.stderr
        found[name] = records(output / "safe-rlhf")
    assert "1 CPU slot (critic, cost, reward, cost_critic)" in done.stdout
    require_same(found["apart"], found["together"], "loss/cost_value", "cost/mean", "lagrange/multiplier")


def test_the_algorithm_file_is_the_papers_listing() -> None:
    """At most 10 statements, no branch, and nothing about where a model lives."""
    body = ast.parse(textwrap.dedent(inspect.getsource(PPO.step))).body[0]
    assert isinstance(body, ast.FunctionDef)
    statements = [
        line for line in body.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
    ]
    assert len(statements) <= 10
    assert not [node for node in ast.walk(body) if isinstance(node, ast.If | ast.For | ast.While | ast.IfExp)]
