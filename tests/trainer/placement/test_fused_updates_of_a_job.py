"""Fused updates of actor and critic on two pipeline stages learn the same bits as updates one after the other."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_api.names import Role
from tests.trainer.measured import SHARED
from tests.trainer.placement.sweep import ROLES, Outcome, pools_of, run, small_job

TRAINING = {"totalSteps": 3, "promptBatchSize": 8, "miniBatchSize": 4, "updateEpochs": 2, "microBatchTokens": 24}


def learnt(folder: Path, folders: Mapping[Role, str], fuse: str) -> Outcome:
    stages: dict[str, Any] = {"parallelism": {"pipeline": 2}, "optimizer": {"learningRate": 1e-3}}
    models: dict[str, Any] = {role: {"uri": f"file://{folders[role]}"} for role in ROLES["PPO"]}
    models |= {role: {**models[role], **stages} for role in ("actor", "critic")}
    training = {**TRAINING, "fuseUpdates": fuse, "callDeadlineSeconds": 60}
    (path := folder / fuse).mkdir()
    pools = pools_of([list(ROLES["PPO"])], slots=[2])
    algorithm = {"name": "PPO", "criticWarmupSteps": 1}
    changes = {"models": models, "training": training, "algorithm": algorithm}
    return run(path, small_job(path, "PPO", folders, pools, changes=changes), folders)


@pytest.mark.slow
def test_losses_gradients_and_weights_have_the_same_bits(folders: Mapping[Role, str], tmp_path: Path) -> None:
    """In the first step the critic alone is updated."""
    fused, alone = (learnt(tmp_path, folders, each) for each in ("Auto", "Never"))
    for one, other in zip(fused.records, alone.records, strict=True):
        measured = {name for name in other if not name.startswith((*SHARED, "bytes/", "sync_bytes/"))}
        assert {"loss/policy", "loss/value", "grad_norm/value"} - measured <= {"loss/policy"}
        assert {name: one[name] for name in measured} == {name: other[name] for name in measured}
    assert all(torch.equal(fused.weights[name], weight) for name, weight in alone.weights.items())
