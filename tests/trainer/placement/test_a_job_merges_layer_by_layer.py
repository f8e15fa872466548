"""A job that merges models takes a layer a step, and writes what a later job reads."""

import shutil
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf_api.files import load
from rlhf_api.names import API_VERSION, KIND
from rlhf_mapper.place import place
from rlhf_trainer.run.on_ray import RayRuntime
from rlhf_trainer.run.slots import Slots
from tests.trainer.placement.light_ray import LightRay
from tests.trainer.placement.sweep import steps
from tests.trainer.tiny import save_tiny

SHARE = 0.25
"""Of the weight of the model that another job has made."""


def test_layers_are_merged_and_a_lost_file_is_written_again(tmp_path: Path) -> None:
    first, path = save_tiny(tmp_path / "first", seed=1), tmp_path / "run" / "both"
    second = save_tiny(tmp_path / "run" / "earlier" / "model", seed=2)
    models = [{"uri": f"file://{first}", "weight": 1 - SHARE}, {"uri": "job://earlier", "weight": SHARE}]
    spec = {"algorithm": {"name": "Merge", "models": models}}
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "both"}, "spec": spec}
    (one,) = load(yaml.safe_dump(document), (), {"earlier": "SFT"})
    light = LightRay(tmp_path / "light")
    with light.patched():
        runtime = RayRuntime(one, place(one, (0,)), {"actor": first}, slots=Slots(), path=path)
        with runtime.running() as shape:
            records = steps(one, runtime, 2)
            shutil.rmtree(path / "model.unfinished")  # as an attempt on another machine that goes on after step 2
            batch = runtime.models["data"].load_batch(runtime.blank(3, 1))
            one.spec.algorithm.step(batch, **runtime.step_models)
            runtime.drain(3)
    assert (len(records), shape.total_steps) == (2, 3)
    found = {name: each for file in (path / "model").glob("*.safetensors") for name, each in load_file(file).items()}
    parts = [load_file(Path(folder) / "model.safetensors") for folder in (first, second)]
    assert found.keys() == parts[0].keys()
    for name, each in found.items():
        torch.testing.assert_close(each, (1 - SHARE) * parts[0][name] + SHARE * parts[1][name])
    read = AutoModelForCausalLM.from_pretrained(path / "model").state_dict()
    assert all(read[name].equal(each) for name, each in found.items())
    assert {"tokenizer.json", "generation_config.json"} <= {file.name for file in (path / "model").iterdir()}
    assert not (path / "model.unfinished").exists()
