"""What a pod of a job tells the operator of its models, in the 4,096 bytes that a kubelet keeps of last words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from rlhf_api.job import Job
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.custom_algorithm import AlgorithmFacts, algorithm_facts
from rlhf_api.spec.model_shape import Shape
from rlhf_mapper.config_file import architecture_in, shape_of
from rlhf_mapper.workload import workload_of
from rlhf_trainer.pods.read_shapes import answer
from tests.api.cases import made
from tests.each import each_case
from tests.trainer.chain.mistakes import LLAMA_7B

KEPT_BYTES = 4096
ENCODER = '{"architectures": ["BertForMaskedLM"]}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a model, of which there is a config.json only."""
    (tmp_path / "llama 7b").mkdir()
    (tmp_path / "llama 7b" / "config.json").write_text(LLAMA_7B)
    return tmp_path / "llama 7b"


def test_the_program_tells_of_all_models_in_order(folder: Path, tmp_path: Path) -> None:
    models = [["file:///nowhere", None], [folder.as_uri(), None], ["package://rlhf_examples/helpful/model", None]]
    message = tmp_path / "message"
    command = [sys.executable, "-m", "rlhf_trainer.pods.read_shapes", json.dumps(models), str(message)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    missing, llama, example = json.loads(message.read_text())
    assert missing == {"problem": "there is no file or folder /nowhere"}
    shape = Shape.model_validate(llama["shape"], by_alias=True, by_name=False)
    assert architecture_in(shape, "actor") == shape_of(LLAMA_7B, "actor")
    assert example["shape"]["numHiddenLayers"] > 0


@pytest.mark.parametrize("config", [ENCODER, "{", '{"hidden_size": 8}'])
def test_of_a_model_without_a_shape_its_weights_are_counted_once(folder: Path, config: str) -> None:
    (folder / "config.json").write_text(config)
    for name, size in (("model-00001-of-00002", 700), ("model-00002-of-00002", 300), ("consolidated", 1000)):
        (folder / f"{name}.safetensors").write_bytes(b"0" * size)
    told = answer(folder.as_uri(), None)
    assert told.keys() == {"problem", "weightBytes"}
    assert told["problem"].startswith("config.json ")
    assert told["weightBytes"] == 1000


def test_a_model_on_the_hub_is_looked_up_in_its_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LLAMA_7B)

    def download(name: str, file: str, *, revision: str | None) -> str:
        assert (name, revision) == ("org/llama", "v2")
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert answer("hf://org/llama", "v2")["shape"]["hiddenSize"] == 4096


def test_a_hub_that_cannot_be_reached_is_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    told = answer("hf://org/llama", None)
    assert told.keys() == {"problem"}
    assert "its config.json cannot be fetched" in told["problem"]


class ProxyError(Exception):
    """As the HTTP client of the hub has them: neither OSError nor ValueError."""


@pytest.mark.parametrize("kind", [OSError, ProxyError])
def test_credentials_of_the_hub_s_address_are_not_told(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    def download(*_: object, **__: object) -> str:
        raise kind("503 for url:\nhttps://me:secret@hub.example.com/org/llama")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert answer("hf://org/llama", None)["problem"].endswith("503 for url: https://hub.example.com/org/llama")


def test_the_last_words_of_all_models_of_a_job_are_kept(folder: Path) -> None:
    config: dict[str, Any] = json.loads(LLAMA_7B)
    sizes = dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size", "head_dim"), 9_999_999)
    (folder / "config.json").write_text(json.dumps({**config, **sizes, "model_type": "m" * 500}))
    told = [
        answer(folder.as_uri(), None),
        answer(f"file:///{'nowhere/' * 200}", None),
        answer("file:///" + "ü" * 200, None),
    ]
    assert "shape" in told[0]
    for each in told:
        assert 5 * len(json.dumps(each, ensure_ascii=False).encode()) + 10 < KEPT_BYTES, (
            "SafeRLHF has five models that may differ"
        )


def told_of(entrypoint: str, options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a pod tells of an algorithm that is in a folder of its PYTHONPATH."""
    asked, message = json.dumps({"entrypoint": entrypoint, "options": options}), folder / "message"
    command = [sys.executable, "-m", "rlhf_trainer.pods.read_shapes", asked, str(message)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(folder)}, cwd="/")
    told: dict[str, Any] = json.loads(message.read_text())
    return told


@each_case("name", sorted(ALGORITHMS.keys() - {"Merge"}))
def test_of_an_algorithm_it_tells_all_that_the_mapper_asks(name: str) -> None:
    """What is made of its answer is to the operator what the class itself is to the trainer."""
    found, document = ALGORITHMS[name], made(name)
    here = Job.parse(document)
    entrypoint = f"{found.__module__}:{found.__name__}"
    document["spec"]["algorithm"] = {"name": "Custom", "entrypoint": entrypoint, "options": {}}
    answered = json.dumps(algorithm_facts(here.spec.algorithm).model_dump(mode="json", by_alias=True))
    assert len(answered) < KEPT_BYTES
    there = Job.parse(document, step=AlgorithmFacts.model_validate_json(answered, by_alias=True, by_name=False))
    assert workload_of(there) == workload_of(here)
    assert (there.models(), there.saved, there.trained()) == (here.models(), here.saved, here.trained())
    for each in ("makes", "offline", "chooses_pairs", "compares_responses", "prompts_drawn", "has_cost_critic"):
        assert getattr(there.spec.algorithm, each) == getattr(here.spec.algorithm, each)
    assert there.model_dump(mode="json", by_alias=True)["spec"]["algorithm"] == document["spec"]["algorithm"]


def test_the_program_reads_an_own_algorithm_with_its_options(tmp_path: Path) -> None:
    source = "import rlhf\nclass Own(rlhf.PolicyGradient):\n    step = staticmethod(rlhf.sample_and_learn)\n"
    (tmp_path / "in_the_image.py").write_text(f"{source}    def advantage(self, returns): return returns\n")
    told = told_of("in_the_image:Own", {"kl": {"coefficient": 0}}, tmp_path)
    assert (told["base"], told["data"], told["holds"]) == ("PolicyGradient", "prompts", [])
    assert told["calls"][-1] == "actor.update_actor"
    assert told_of("in_the_image:Own", {"kl": {}}, tmp_path)["holds"] == ["needs_reference", "rewards_read_log_probs"]
    wrong = told_of("in_the_image:Own", {"shrink": 1}, tmp_path)
    assert wrong["problem"].startswith("spec.algorithm.options.shrink: unknown field")
    assert told_of("nowhere:Own", {}, tmp_path)["problem"].endswith("ModuleNotFoundError: No module named 'nowhere'")
