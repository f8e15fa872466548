"""The demo's chain, shortened, run once through the command line for all tests of this folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.trainer.chain.leftovers import SECRETS
from tests.trainer.outputs.collector import Collector
from tests.trainer.tiny import save_tiny

ROOT = Path(__file__).parents[3]
MANIFEST = ROOT / "examples" / "01-helpful-ppo.yaml"
SHORT = [
    "--set=helpful-sft:training.totalSteps=15",
    "--set=helpful-rm:training.totalSteps=10",
    "--set=helpful-ppo:training.totalSteps=3",
    "--set=evaluation.data.limit=45",  # does not divide by 2 ranks
]
KEPT = ("--set=helpful-ppo:checkpoint.everySteps=1", "--set=helpful-ppo:checkpoint.keepLast=3")
"""Options with which the checkpoints of all steps of PPO are kept."""

LEFT, RIGHT = "{name: left, models: [actor, reference]", "{name: right, models: [critic, reward]"
TWO_POOLS = (
    "--set=helpful-ppo:placement.mode=Manual",
    f"--set=helpful-ppo:placement.pools=[{LEFT}, slotsPerNode: 1}}, {RIGHT}, slotsPerNode: 1}}]",
)
"""Options that give actor + reference and critic + reward a pool of one slot each."""


def rlhf(*arguments: object, deadline: float = PATIENCE_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run the `rlhf` command as a user would, with secrets in the environment."""
    command = [sys.executable, "-m", "rlhf_trainer", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | SECRETS
    return subprocess.run(
        command, capture_output=True, text=True, timeout=deadline, check=False, cwd=ROOT, env=environment
    )


@pytest.fixture
def handlers() -> Iterator[None]:
    """`rlhf run` sets handlers for the signals of its process; for tests in which that is the one of the tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def records(job_folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (job_folder / "metrics.jsonl").read_text().splitlines()]


def only_ppo_left(chain: tuple[Path, str], output: Path) -> Path:
    """A run folder in which the first two jobs of `chain` have finished."""
    for name in ("helpful-sft", "helpful-rm"):
        shutil.copytree(chain[0] / name, output / name)
    return output


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """What gets the spans of the chain's PPO."""
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> tuple[Path, str]:
    """(run folder, what the terminal showed) of the shortened chain on one pool of two slots."""
    output = tmp_path_factory.mktemp("chain") / "run"
    traced = f"--set=helpful-ppo:outputs.otel.endpoint={collector.url}"
    done = rlhf("run", MANIFEST, "--output", output, *SHORT, *KEPT, traced, "--tensorboard", "--trace")
    assert done.returncode == 0, done.stderr
    return output, done.stdout


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models: `language`, `reward`, and `labels`, a classifier with two."""
    folder = tmp_path_factory.mktemp("models")
    for name, labels in {"language": None, "reward": 1, "labels": 2}.items():
        save_tiny(folder / name, seed=1, labels=labels)
    return folder
