"""Every rank of a group makes the group's collectives in one order, or NCCL would wait for ever: eight ranks."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.names import Role
from tests.trainer.nccl_site.nccl_like import install
from tests.trainer.placement.sweep import ROLES, pools_of, run, small_job
from tests.trainer.tiny import divisible_config, save_tiny

CUT = {"pipeline": 2, "tensor": 2}
MESSAGE = re.compile(r"(send|recv) (\d+) (.*)")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Role, str]:
    """Models with heads for two tensor-parallel ranks."""
    root = tmp_path_factory.mktemp("models")
    language = save_tiny(root / "language", seed=3, config=divisible_config())
    reward = save_tiny(root / "reward", seed=4, labels=1, config=divisible_config())
    return {"actor": language, "reference": language, "critic": reward, "reward": reward}


def sequences(folder: Path) -> dict[str, dict[int, list[str]]]:
    """Group -> rank -> what it has made in the group."""
    found: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for file in folder.iterdir():
        group, _, rank = file.name.partition("-")
        found[group][int(rank)] = file.read_text().splitlines()
    return found


def messages(lines: Sequence[str], kind: str, other: int) -> list[str]:
    """Messages to, or from, another rank."""
    parts = (match.groups() for match in map(MESSAGE.fullmatch, lines) if match)
    return [said for each, rank, said in parts if (each, int(rank)) == (kind, other)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("partition", "slots", "changes"),
    [
        pytest.param([["actor", "critic", "reference", "reward"]], [8], {}, id="one pool"),
        pytest.param([["actor", "reference"], ["critic", "reward"]], [4, 4], {}, id="two pools"),
        pytest.param(
            [["actor", "reference"], ["critic", "reward"], ["rollout"]],
            [2, 4, 2],
            {"rollout": {"maxStaleness": 1, "weightSync": "Delta"}},
            id="a rollout pool ahead",
        ),
    ],
)
def test_they_do_so_whatever_the_placement(
    folders: Mapping[Role, str],
    tmp_path: Path,
    partition: list[list[str]],
    slots: list[int],
    changes: dict[str, Any],
) -> None:
    """40 rows in batches of 16, over up to eight ranks; the critic and the reward are cut into stages and shards."""
    (log := tmp_path / "log").mkdir()
    models: dict[str, Any] = {role: {"uri": f"file://{folders[role]}"} for role in ROLES["PPO"]}
    for role in ("actor", "critic"):
        models[role]["optimizer"] = {"learningRate": 1e-3}
    for role in ("critic", "reward"):
        models[role]["parallelism"] = CUT
    pools = pools_of(partition, slots=slots)
    training = {"totalSteps": 3, "promptBatchSize": 16, "miniBatchSize": 8, "updateEpochs": 2}
    changes = {**changes, "models": models, "training": training}
    one = small_job(tmp_path, "PPO", folders, pools, changes=changes)
    run(tmp_path, one, folders, prepare=partial(install, log=log))
    found = sequences(log)
    assert len(found) >= 4
    for ranks in found.values():
        collectives = {rank: [line for line in lines if not MESSAGE.fullmatch(line)] for rank, lines in ranks.items()}
        assert all(lines == collectives[0] for lines in collectives.values())
        for one_rank, lines in ranks.items():
            for other, others in ranks.items():
                assert messages(lines, "send", other) == messages(others, "recv", one_rank)
