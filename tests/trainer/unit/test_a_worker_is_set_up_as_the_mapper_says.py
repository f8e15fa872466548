"""What the mapper chose for a model on GPUs is in the setting from which the model's workers are built."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.mapping import Device, DeviceMapping, MappedPool, ModelPrediction, Prediction
from rlhf_trainer.controller import call_log, worker_group
from rlhf_trainer.run import on_ray, slots
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.data import DataShape
from rlhf_trainer.workers.retokenized import with_prompts
from tests.trainer.jobs import job

ROLES: tuple[Role, ...] = ("actor", "critic", "reference", "reward")
RECOMPUTES = {"actor": True, "critic": True, "reference": False, "reward": False}
OFFLOADS = {"actor": "All", "critic": "Optimizer", "reference": "Parameters", "reward": "None"}
MICRO_BATCHES = {"actor": 3, "critic": 1, "reference": 1000, "reward": 2}
SEQUENCE = 10 + 22
"""Prompt and response tokens."""
MOST_TOKENS = 256


class Group:
    """Stands for the processes of a pool: keeps the workers that it was told to build."""

    built: ClassVar[dict[str, Any]] = {}

    def __init__(self, pool: Any, *, environment: Mapping[str, str], **_: Any) -> None:
        assert environment.items() >= slots.settings(pool.device).items(), "ranks would keep freed memory"
        self.layout = ParallelSizes(data=pool.size)

    def build(self, workers: dict[str, Any]) -> dict[str, Any]:
        self.built.update(workers)
        group: Any = self
        return {role: worker_group.ModelHandle(group, role, spec.worker_class) for role, spec in workers.items()}

    def call(self, *_: Any) -> Any:
        """The answer of the only call that is made: how much data there is."""

        class Answer:
            def result(self) -> list[DataShape]:
                return [DataShape(rows=8, total_steps=7, evaluation_rows=0, facts=())]

        return Answer()

    def wait_until_built(self) -> None: ...
    def add_reader(self, *_: Any) -> None: ...
    def clear(self) -> None: ...
    def stop(self) -> None: ...


class Pool:
    """Stands for the slots of a pool in Ray."""

    threads = 1

    def __init__(self, slots: Any, *, device: Device, **_: Any) -> None:
        self.size, self.device = sum(slots), device

    def reserve(self, *, deadline: float) -> None: ...
    def release(self) -> None: ...


class Meter:
    """Stands for the meter of Ray's serialiser."""

    def watching(self) -> Any:
        return nullcontext()

    def read(self) -> int:
        return 0


def ppo(
    folder: Path,
    *,
    offload: str | None = None,
    recomputes: bool | None = None,
    share: float | None = None,
    tokens: int | None = MOST_TOKENS,
) -> Job:
    """A PPO job that says the critic's `offload` and whether it recomputes, generation's `share` of a GPU and a
    micro-batch's `tokens`.
    """
    critic: dict[str, Any] = {"uri": "hf://of/model", **({"offload": offload} if offload else {})}
    if recomputes is not None:
        critic["gradientCheckpointing"] = recomputes
    spec = {
        "algorithm": {"name": "PPO"},
        "models": {**{role: {"uri": "hf://of/model"} for role in ROLES}, "critic": critic},
        "data": {
            "train": {"uri": "hf://of/data", "promptKey": "prompt"},
            "maxPromptTokens": 10,
            "maxResponseTokens": SEQUENCE - 10,
        },
        "training": {"totalSteps": 1, "promptBatchSize": 8} | ({"microBatchTokens": tokens} if tokens else {}),
        "rollout": {"gpuMemoryUtilization": share} if share else {},
    }
    return job(folder, "ppo", spec)


def mapping(device: Device) -> DeviceMapping:
    predictions = {
        role: ModelPrediction(
            micro_batch=MICRO_BATCHES[role],
            offload=OFFLOADS[role],
            recomputes=RECOMPUTES[role],
            seconds={},
            memory={},
        )
        for role in ROLES
    }
    return DeviceMapping(
        device=device,
        pools=(MappedPool(name="all", models=ROLES, slots_per_machine=(2,)),),
        sizes=dict.fromkeys(ROLES, ParallelSizes(data=2)),
        prediction=Prediction(
            step_seconds=1.0,
            low=0.5,
            high=2.0,
            tokens_per_second=1.0,
            phases={},
            stages={},
            models=predictions,
            memory_limit={"all": 1e9},
            gpu_memory_utilization=0.3,
        ),
    )


def arguments(
    job: Job, placed: DeviceMapping, patch: pytest.MonkeyPatch, folder: Path, retokenized: Sequence[Role] = ()
) -> dict[str, Any]:
    """Role, or what else works on the batch -> what its workers are built from when the job starts."""
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setattr(on_ray, "look_at_links", lambda *_, **__: ({}, []))
    patch.setattr(on_ray, "slowest_network", lambda *_, **__: float("inf"))
    patch.setattr(on_ray, "with_routing", lambda job, *_: job)  # it reads config.json
    patch.setattr(slots, "WorkerGroup", Group)
    patch.setattr(slots, "ResourcePool", Pool)
    patch.setattr(call_log, "PayloadMeter", Meter)
    patch.setattr(Group, "built", {})
    folders: dict[Role, str] = dict.fromkeys(get_args(Role), "of/model")
    columns = job.spec.columns(job.spec.data.train)
    options: dict[str, Any] = {"slots": slots.Slots(), "path": folder, "columns": columns, "retokenized": retokenized}
    runtime = on_ray.RayRuntime(with_prompts(job) if retokenized else job, placed, folders, **options)
    with runtime.running():
        return {name: spec.arguments for name, spec in Group.built.items()}


def settings(job: Job, placed: DeviceMapping, patch: pytest.MonkeyPatch, folder: Path) -> dict[str, WorkerSetting]:
    """Role -> the setting that its workers are built from."""
    found = arguments(job, placed, patch, folder)
    return {role: found[role]["setting"] for role in ROLES}


def test_micro_batch_offload_and_shares_are_the_mappers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(ppo(tmp_path), mapping("GPU"), monkeypatch, tmp_path)
    tokens = {role: each.job.spec.training.micro_batch_tokens for role, each in found.items()}
    assert tokens == {"actor": 3 * SEQUENCE, "critic": SEQUENCE, "reference": MOST_TOKENS, "reward": 2 * SEQUENCE}
    assert {role: each.model.offload for role, each in found.items()} == OFFLOADS
    assert {role: each.model.gradient_checkpointing for role, each in found.items()} == RECOMPUTES
    assert found["actor"].job.spec.rollout.gpu_memory_utilization == pytest.approx(0.35)


def test_what_the_manifest_says_itself_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ppo(tmp_path, offload="All", recomputes=False, share=0.6)
    found = settings(said, mapping("GPU"), monkeypatch, tmp_path)
    assert found["critic"].model.offload == "All"
    assert found["critic"].model.gradient_checkpointing is False
    assert found["actor"].job.spec.rollout.gpu_memory_utilization == 0.6


def test_on_cpu_nothing_of_the_prediction_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(ppo(tmp_path), mapping("CPU"), monkeypatch, tmp_path)
    assert {each.job.spec.training.micro_batch_tokens for each in found.values()} == {MOST_TOKENS}
    assert {each.model.offload for each in found.values()} == {"None"}
    assert not any(each.model.gradient_checkpointing for each in found.values())
    assert found["actor"].job.spec.rollout.gpu_memory_utilization is None


def test_a_silent_manifest_has_smaller_micro_batches_on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(ppo(tmp_path, tokens=None), mapping("CPU"), monkeypatch, tmp_path)
    sizes = {hidden: found["actor"].job.micro_batch_tokens("CPU", hidden=hidden) for hidden in (32, 128, 512, 4096)}
    assert sizes == {32: 16384, 128: 8192, 512: 2048, 4096: 2048}
    on_gpus = settings(ppo(tmp_path, tokens=None), mapping("GPU"), monkeypatch, tmp_path)
    assert on_gpus["reference"].job.micro_batch_tokens("GPU", hidden=128) == 16384
    assert on_gpus["actor"].job.micro_batch_tokens("GPU", hidden=128) == 3 * SEQUENCE


def test_columns_for_another_vocabulary_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {
        "algorithm": {"name": "Generate"},
        "models": {role: {"uri": "hf://of/model"} for role in ("actor", "reward")},
        "data": {"train": {"uri": "hf://of/data", "promptKey": "question", "columns": ["answer"]}},
        "training": {"totalSteps": 1, "promptBatchSize": 8},
    }
    pool = MappedPool(name="all", models=("actor", "reward"), slots_per_machine=(2,))
    placed = replace(mapping("CPU"), pools=(pool,))
    found = arguments(job(tmp_path, "rows", spec), placed, monkeypatch, tmp_path, retokenized=["reward"])
    assert found["reward"]["setting"].job.spec.data.train.columns == ("answer", "question")
    assert found["responses"]["columns"] == ("answer",)
