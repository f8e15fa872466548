"""A run writes each version of its actor to a folder or bucket, and readers read late (`rollout.weightStore`)."""

import os
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_api.names import Role
from rlhf_mapper.place import place
from rlhf_trainer.checkpoint import CheckpointStore
from rlhf_trainer.hybrid_engine import weight_store
from rlhf_trainer.hybrid_engine.weight_store import WeightReader
from rlhf_trainer.run.job_run import Checkpoints, Evaluator, Reporter, run_job
from rlhf_trainer.run.on_ray import RayRuntime
from rlhf_trainer.run.slots import Slots
from rlhf_trainer.run.step_models import with_calls
from rlhf_trainer.run_folder.export import write_held
from rlhf_trainer.storage import open_storage
from rlhf_trainer.telemetry import StepReport
from tests.trainer.placement.light_ray import LightRay
from tests.trainer.placement.sweep import ROLES, pools_of, small_job

FULL_EVERY, STEPS = 3, 4
"""Versions 1 and 4 are full."""


def prepare(variables: Mapping[str, str]) -> None:
    """Have a worker find the bucket, and write full versions often."""
    os.environ.update(variables)
    weight_store.FULL_EVERY = FULL_EVERY


class AfterSteps(Reporter):
    """Reporter that does something after some steps, and keeps the records."""

    def __init__(self, after: Mapping[int, Callable[[], None]]) -> None:
        self._after = after
        self.records: list[Mapping[str, float]] = []

    def step(self, report: StepReport) -> None:
        self.records.append(report.record)
        self._after.get(len(self.records), lambda: None)()


def records_of(folder: Path, uri: str, folders: Mapping[Role, str], after: AfterSteps) -> list[Mapping[str, float]]:
    """Run PPO on two ranks; each version is in the store when its step is recorded. `folder/model` gets the actor."""
    models: dict[str, Any] = {role: {"uri": f"file://{each}"} for role, each in folders.items()}
    models["actor"]["optimizer"] = {"learningRate": 1e-5}
    training = {"totalSteps": STEPS, "promptBatchSize": 4, "callDeadlineSeconds": 60, "precision": "BF16"}
    changes = {"training": training, "rollout": {"weightStore": uri}, "models": models}
    one = small_job(folder, "PPO", folders, pools_of([list(ROLES["PPO"])], slots=(2,)), changes=changes)
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    with LightRay(folder / "light", prepare=partial(prepare, variables)).patched():
        runtime = RayRuntime(one, place(one, (0,)), folders, slots=Slots(), path=folder)
        with runtime.running() as shape:
            actor = runtime.models["actor"]
            publish = partial(actor.publish_weights, waits=True)
            runtime.models["actor"] = with_calls(actor, publish_weights=lambda waits: publish() or waits)
            others: Any = {"evaluation": Evaluator(), "checkpoints": Checkpoints(), "reporter": after}
            run_job(one, runtime, shape, saves=("actor", folder / "model"), **others)
    return after.records


def flip_a_bit(uri: str, byte: int) -> None:
    """Damage a file, whose size stays; the second call repairs it."""
    files, path = open_storage(uri)
    content = bytearray(files.cat_file(path))
    content[byte] ^= 1
    files.pipe_file(path, bytes(content))


@pytest.mark.parametrize("kind", ["folder", pytest.param("s3", marks=pytest.mark.slow)])
def test_readers_that_join_late_get_the_trainers_weights(
    kind: str, folders: Mapping[Role, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Readers refuse the second delta, which is damaged, stay at the version before, and take the next full one.

    First the sum of its weights is wrong, which shows when the weights are spoiled, and then a file.
    """
    uri = f"file://{tmp_path}/store" if kind == "folder" else f"{request.getfixturevalue('s3')}/{uuid.uuid4()}"
    readers = [WeightReader(uri) for _ in range(3)]
    seen: list[tuple[bool, str]] = []

    def read(count: int) -> None:
        seen.extend((bool(each.update()), each.held.partition("-")[0]) for each in readers[:count])

    def damage() -> None:
        files, path = open_storage(f"{uri}/versions/step-000003/state.json")
        last_digit = files.cat_file(path).index(b'", "base"') - 1
        flip_a_bit(f"{uri}/versions/step-000003/state.json", last_digit)
        read(1)
        flip_a_bit(f"{uri}/versions/step-000003/state.json", last_digit)
        flip_a_bit(f"{uri}/versions/step-000003/shard-1.safetensors", -9)
        read(2)

    after = AfterSteps({1: partial(read, 1), 2: partial(read, 1), 3: damage, 4: partial(read, 3)})
    records = records_of(tmp_path, uri, folders, after)
    assert seen == [(False, "1"), (False, "2"), *[(True, "2")] * 3, *[(False, "4")] * 3]
    kinds = ["full", "delta", "delta", "full"]
    sizes = [record[f"weight_store_bytes/{kind}"] for kind, record in zip(kinds, records, strict=True)]
    assert max(sizes[1:3]) < 0.5 * min(sizes[0], sizes[3])
    assert [record["weight_store_missed"] for record in records] == [0] * STEPS
    assert [each.step for each in CheckpointStore(f"{uri}/versions").all()] == [4]
    trained = load_file(tmp_path / "model" / "model.safetensors")
    write_held(readers[0], tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for weights in (exported, *(each.weights for each in readers)):
        assert weights.keys() == trained.keys()
        assert all(torch.equal(weights[name].bfloat16(), weight.bfloat16()) for name, weight in trained.items())
