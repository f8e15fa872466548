"""The same steps of PPO and of SafeRLHF on one pool of two slots, and with their models on two pools.

Two ranks or one: sums are taken in another order, so the tolerance is 1e-4 relative, 1e-5 absolute, over 3 steps.
"""

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from rlhf_trainer.algorithms import ppo
from tests.trainer.chain.conftest import (
    LEFT,
    MANIFEST,
    RIGHT,
    ROOT,
    SHORT,
    TWO_POOLS,
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


def test_two_pools_give_the_losses_of_one(chain: tuple[Path, str], tmp_path: Path) -> None:
    """On the two pools, the actor and the reward model leave their devices while they are not in use."""
    output = only_ppo_left(chain, tmp_path / "run")
    offload = ("--set=helpful-ppo:models.actor.offload=All", "--set=helpful-ppo:models.reward.offload=Parameters")
    done = rlhf("run", MANIFEST, f"--output={output}", *SHORT, *TWO_POOLS, *offload)
    assert done.returncode == 0, done.stderr
    assert "1 CPU slots (actor, reference) | 1 CPU slots (critic, reward)" in done.stdout
    two, one = records(output / "helpful-ppo"), records(chain[0] / "helpful-ppo")
    require_same(two, one)
    for role in ("actor", "reward"):
        assert all(apart[f"idle_bytes/{role}"] == 0 for apart in two)
        assert all(together[f"idle_bytes/{role}"] > 0 for together in one)


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
    assert "1 CPU slots (critic, cost, reward, cost_critic)" in done.stdout
    require_same(found["apart"], found["together"], "loss/cost_value", "cost/mean", "lagrange/multiplier")


def test_the_algorithm_file_is_the_papers_listing() -> None:
    """At most 10 statements, no branch, and nothing about where a model lives."""
    body = ast.parse(inspect.getsource(ppo.step)).body[0]
    assert isinstance(body, ast.FunctionDef)
    statements = [
        line for line in body.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
    ]
    assert len(statements) <= 10
    assert not [node for node in ast.walk(body) if isinstance(node, ast.If | ast.For | ast.While | ast.IfExp)]
