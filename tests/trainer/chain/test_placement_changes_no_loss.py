"""The same PPO steps on one pool of two slots, and with actor + reference and critic + reward on pools of their own.

Two ranks or one: sums are taken in another order, so the tolerance is 1e-4 relative, 1e-5 absolute, over 3 steps.
"""

import ast
import inspect
from pathlib import Path

import pytest

from rlhf_trainer.algorithms import ppo
from tests.trainer.chain.conftest import MANIFEST, SHORT, TWO_POOLS, only_ppo_left, records, rlhf

COMPARED = ("loss/policy", "loss/value", "reward/mean", "kl/reference", "entropy", "response_length/mean")


def test_two_pools_give_the_losses_of_one(chain: tuple[Path, str], tmp_path: Path) -> None:
    output = only_ppo_left(chain, tmp_path / "run")
    done = rlhf("run", MANIFEST, f"--output={output}", *SHORT, *TWO_POOLS)
    assert done.returncode == 0, done.stderr
    assert "1 CPU slots (actor, reference) | 1 CPU slots (critic, reward)" in done.stdout
    one, two = records(chain[0] / "helpful-ppo"), records(output / "helpful-ppo")
    for apart, together in zip(two, one, strict=True):
        for name in COMPARED:
            assert apart[name] == pytest.approx(together[name], rel=1e-4, abs=1e-5), (together["step"], name)
        assert apart["bytes/controller"] == 0


def test_the_algorithm_file_is_the_papers_listing() -> None:
    """At most 10 statements, no branch, and nothing about where a model lives."""
    body = ast.parse(inspect.getsource(ppo.step)).body[0]
    assert isinstance(body, ast.FunctionDef)
    statements = [
        line for line in body.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
    ]
    assert len(statements) <= 10
    assert not [node for node in ast.walk(body) if isinstance(node, ast.If | ast.For | ast.While | ast.IfExp)]
