"""A job leaves its processes to the next job of the file, unless they hold memory of a GPU."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from rlhf_mapper.mapping import Device, DeviceMapping
from rlhf_trainer.run import wiring
from tests.trainer.jobs import job

Name = Literal["SFT", "GRPO"]


class AskedError(Exception):
    """The processes were asked for."""


class Slots:
    """Stands for the slots of a run: only hears what is asked for."""

    def held(self, *_: Any, may_stay: bool, **__: Any) -> Any:
        raise AskedError(may_stay)


@pytest.mark.parametrize(
    ("algorithm", "device", "stays"), [("SFT", "CPU", True), ("GRPO", "CPU", True), ("SFT", "GPU", False)]
)
def test_processes_without_a_gpu_stay(
    algorithm: Name, device: Device, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "PayloadMeter", lambda: SimpleNamespace(watching=nullcontext))
    rl: dict[str, Any] = {"reward": {"uri": "hf://of/model"}} if algorithm == "GRPO" else {}
    spec = {
        "algorithm": {"name": algorithm},
        "models": {"actor": {"uri": "hf://of/model"}, **rl},
        "data": {"train": {"uri": "hf://of/data"}, "maxPromptTokens": 10, "maxResponseTokens": 22},
        "training": {"totalSteps": 1, **({"promptBatchSize": 8} if rl else {"batchSize": 8})},
        **({"rollout": {"samplesPerPrompt": 2}} if rl else {}),
    }
    placed = DeviceMapping(device=device, pools=(), sizes={})
    slots: Any = Slots()
    runtime = wiring.RayRuntime(job(tmp_path, "one", spec), placed, {}, slots=slots, stacks=tmp_path / "stacks.txt")
    with pytest.raises(AskedError) as asked, runtime.running():
        pass
    assert asked.value.args == (stays,)
