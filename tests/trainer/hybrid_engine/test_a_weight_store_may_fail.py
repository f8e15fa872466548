"""What a rank publishes when the store fails or is slow, and an adapter, which readers add to its base model."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.hybrid_engine import weight_store
from rlhf_trainer.hybrid_engine.weight_store import WeightPublisher, WeightReader
from rlhf_trainer.run_folder.export import write_held
from rlhf_trainer.stored_tensors import write_piece
from rlhf_trainer.telemetry import Report, recorder
from rlhf_trainer.training.adapters import write_adapter_config
from rlhf_trainer.training.loading import load_tokenizer
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.saving import save_config_and_tokenizer, save_model
from rlhf_trainer.training.trainer import Trainer
from tests.trainer.jobs import job
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import divisible_config, save_tiny
from tests.trainer.training.test_an_adapter_is_trained_beside_frozen_weights import train, trainer_of


def publisher_of(folder: str, output: Path) -> tuple[Trainer, WeightPublisher]:
    """A trainer of an adapter, and the end of the store `output/store` on the only rank."""
    trainer = trainer_of(folder, ParallelSizes(data=1))
    tokenizer = load_tokenizer(folder, trust_remote_code=False, revision=None)
    models: dict[str, Any] = {role: {"uri": f"file://{folder}"} for role in ("actor", "reference", "reward")}
    models["actor"] |= {"lora": {"rank": 4}, "optimizer": {}}
    spec: dict[str, Any] = {
        "algorithm": {"name": "REINFORCEPP"},
        "models": models,
        "data": {"train": {"uri": "hf://x"}, "maxPromptTokens": 4, "maxResponseTokens": 4},
        "training": {"totalSteps": 1, "promptBatchSize": 1},
        "rollout": {"weightStore": f"file://{output}/store"},
    }

    def write_config(path: Path) -> None:
        save_config_and_tokenizer(inner(trainer.model.module), tokenizer, path)
        assert trainer.model.adapter
        write_adapter_config(trainer.model.adapter, path)

    return trainer, WeightPublisher(job(output, "adapted", spec), trainer.model, torch.float32, write_config)


def publish(folder: str, output: str) -> list[Report]:
    """Four versions of an adapter: the store is no folder, is one, is busy for the third, and is free again."""
    (trainer, publisher), store = publisher_of(folder, Path(output)), Path(output) / "store"
    recorder.drain()
    reports = []

    def step(version: int, *, waits: bool) -> None:
        train(trainer, range(version, version + 1))
        publisher.publish(version, waits=waits)
        reports.append(recorder.drain())

    store.write_text("no folder")
    step(1, waits=True)
    store.unlink()
    free = threading.Event()
    with pytest.MonkeyPatch.context() as patch:

        def write_late(*given: Any) -> None:
            free.wait()
            write_piece(*given)

        patch.setattr(weight_store, "write_piece", write_late)
        step(2, waits=False)
        step(3, waits=False)
        free.set()
        step(4, waits=True)
    tokenizer = load_tokenizer(folder, trust_remote_code=False, revision=None)
    save_model(trainer.model, tokenizer, Path(output) / "model")
    return reports


def test_a_run_goes_on_without_its_store(tmp_path: Path) -> None:
    folder, uri = save_tiny(tmp_path / "start", seed=1, config=divisible_config()), f"file://{tmp_path}/store"
    with pytest.raises(EnvironmentProblem, match=f"{uri}: .* no whole version"):
        WeightReader(uri).update()
    reports = run_kept_ranks(1, publish, folder, str(tmp_path))[0]
    assert [each.sums["weight_store_missed"] for each in reports] == [1, 0, 1, 0]
    (sentence,) = reports[0].warnings.values()
    assert sentence.startswith(f"version 1 of the weights for readers: {uri}")
    assert not any(each.warnings for each in reports[1:])
    assert reports[3].sums["weight_store_bytes/full"] > 0
    reader = WeightReader(uri)
    assert reader.update() == ""
    write_held(reader, tmp_path / "exported")
    exported, trained = (load_file(tmp_path / each / "model.safetensors") for each in ("exported", "model"))
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in trained.items())
    assert (
        sum(file.stat().st_size for file in (tmp_path / "store").rglob("shard-*"))
        < (tmp_path / "model" / "model.safetensors").stat().st_size
    )
