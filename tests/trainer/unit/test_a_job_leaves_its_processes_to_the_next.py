"""A job leaves its processes to the next job of the file, if there is one, unless they hold memory of a GPU."""

import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rlhf_mapper.mapping import Device, DeviceMapping
from rlhf_trainer.collector import collector_off
from rlhf_trainer.controller import call_log
from rlhf_trainer.controller.slot_process import SlotProcess
from rlhf_trainer.run import on_ray
from tests.trainer.jobs import job


class AskedError(Exception):
    """The processes were asked for."""


class Slots:
    """Stands for the slots of a run: only hears what is asked for."""

    def held(self, *_: Any, may_stay: bool, **__: Any) -> Any:
        raise AskedError(may_stay)


@pytest.mark.parametrize(
    ("device", "is_last", "stays"), [("CPU", False, True), ("GPU", False, False), ("CPU", True, False)]
)
def test_processes_without_a_gpu_stay_for_another_job(
    device: Device, is_last: bool, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_log, "PayloadMeter", lambda: SimpleNamespace(watching=nullcontext))
    spec = {
        "algorithm": {"name": "SFT"},
        "models": {"actor": {"uri": "hf://of/model"}},
        "data": {"train": {"uri": "hf://of/data"}, "maxPromptTokens": 10, "maxResponseTokens": 22},
        "training": {"totalSteps": 1, "batchSize": 8},
    }
    made, placed = job(tmp_path, "one", spec), DeviceMapping(device=device, pools=(), sizes={})
    slots: Any = Slots()
    runtime = on_ray.RayRuntime(made, placed, {}, slots=slots, path=tmp_path)
    with pytest.raises(AskedError) as asked, runtime.running(is_last=is_last):
        pass
    assert asked.value.args == (stays,)


class Model:
    """Is part of a cycle, as models are."""

    def __init__(self) -> None:
        self.itself = self


class Actor:
    """Imports much once its model is there, as that of an RL job does."""

    alive: ClassVar[weakref.WeakSet[Model]] = weakref.WeakSet()
    closed: ClassVar[int] = 0

    def __init__(self) -> None:
        self.model = Model()
        self.alive.add(self.model)
        with collector_off():
            pass

    def close(self) -> None:
        type(self).closed += 1


def test_nothing_is_left_of_a_job_s_models() -> None:
    process = SlotProcess(pool="all", path=())
    process.join({"RANK": "0"}, lambda: 0)
    for role in ("actor", "critic"):
        process.build(role, Actor, {})
    assert len(Actor.alive) == 2
    process.clear()
    assert not Actor.alive
    assert Actor.closed == 2
