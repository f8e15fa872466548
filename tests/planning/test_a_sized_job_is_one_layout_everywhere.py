"""The chosen row's files: the manifest is planned as it was sized, and lines of others are imported as the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_api.files import load
from rlhf_api.names import Role
from rlhf_importers.command import convert
from rlhf_mapper.hardware import Cluster
from rlhf_mapper.mapping import DeviceMapping
from rlhf_planning.job_plan import plan_job
from rlhf_planning.market import usual_nodes
from rlhf_planning.sized_job import shapes_of
from tests.each import each_case
from tests.planning.sized import answer

QUESTIONS = (
    "32b --response 16k --gpus h100=16",
    "32b --response 4k --gpus h100=8",
    "70b --lora 16 --gpus h100=8",
    "7b --algorithm PPO --gpus h100=8",
    "7b --algorithm RLOO --gpus 4090=16",
    "7b --algorithm DPO --gpus a100=8",
    "qwen3-30b-a3b --gpus h200=16",
)


@each_case("question", QUESTIONS)
def test_the_manifest_is_planned_as_it_was_sized(question: str) -> None:
    found = answer(question)
    row = found["chosen"]
    (job,) = load(found["files"]["job.yaml"]["text"])
    cluster = Cluster((usual_nodes(row["gpu"], row["gpus"]),))
    planned = plan_job(job, cluster, shapes_of(job), device="GPU")
    assert isinstance(planned, DeviceMapping)
    assert planned.prediction
    assert planned.prediction.step_seconds == pytest.approx(row["step_seconds"])


@each_case("project", ["verl", "openrlhf", "trl"])
@each_case("question", QUESTIONS)
def test_the_lines_of_others_are_imported_as_the_job(question: str, project: str) -> None:
    found = answer(question)
    (job,) = load(found["files"]["job.yaml"]["text"])
    script = found["files"][f"{project}.sh"]
    if not script["text"]:
        assert script["remark"]
        return
    draft = convert(script["text"], project, source="script.sh")
    spec: dict[str, Any] = draft.spec
    assert (draft.unknown, draft.lost) == ([], {})
    assert spec["algorithm"]["name"] == job.spec.algorithm.name
    assert spec["models"]["actor"]["uri"] == job.models()["actor"].uri
    lora = job.models()["actor"].lora
    assert spec["models"]["actor"].get("lora", {}).get("rank") == (lora and lora.rank)
    training = spec["training"]
    if job.spec.algorithm.offline:
        assert training["batchSize"] == job.spec.training.batch_size
        return
    assert spec["data"]["maxResponseTokens"] == job.spec.data.max_response_tokens
    assert spec["rollout"]["samplesPerPrompt"] == job.spec.rollout.samples_per_prompt
    assert (training["promptBatchSize"], training["miniBatchSize"]) == (128, 1024)
    if project != "openrlhf":  # it counts rows, not steps
        assert training["totalSteps"] == job.spec.training.total_steps
    else:
        assert spec["data"]["train"]["limit"] == 128 * 200


def test_verl_gets_each_model_its_own_sizes() -> None:
    found = answer("8b --algorithm PPO --gpus h100=4")["files"]
    (job,) = load(found["job.yaml"]["text"])
    mapping = plan_job(job, Cluster((usual_nodes("h100", 4),)), shapes_of(job), device="GPU")
    assert isinstance(mapping, DeviceMapping)
    of_verl: dict[Role, str] = {
        "actor": "actor_rollout_ref.actor",
        "reference": "actor_rollout_ref.ref",
        "critic": "critic",
    }
    for role, name in of_verl.items():
        for size in ("tensor", "pipeline"):
            option = f" {name}.megatron.{size}_model_parallel_size={getattr(mapping.sizes[role], size)} "
            assert option in found["verl.sh"]["text"].replace("\n", " ") + " "
    assert len({mapping.sizes[role].tensor for role in of_verl}) > 1
    assert found["verl.sh"]["remark"] == "the reward's sizes are yours to set"


def test_files_are_written_and_refusals_are_not(tmp_path: Path) -> None:
    found = answer(f"7b --algorithm SFT --gpus h100=8 --output {tmp_path / 'sized'}")
    written = {file.name: file.read_text() for file in (tmp_path / "sized").iterdir()}
    assert set(written) == {"job.yaml", "openrlhf.sh", "trl.sh"}
    assert written == {name: found["files"][name]["text"] for name in written}
    assert found["files"]["verl.sh"] == {"text": "", "remark": "it has no SFT"}
