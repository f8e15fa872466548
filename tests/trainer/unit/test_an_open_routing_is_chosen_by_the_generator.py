"""The choice of `rollout.routing` that a manifest leaves open, and settings that only mixtures have."""

from pathlib import Path
from typing import Any

import pytest

from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.mapping import DeviceMapping, MappedPool
from rlhf_trainer.run.preconditions import require_mixtures
from rlhf_trainer.run.worker_specs import with_routing
from tests.trainer.families import FAMILIES
from tests.trainer.jobs import job

MIXTURE, DENSE = "Qwen3-MoE", "Llama"


def sums(folder: Path, *, rollout: dict[str, Any] | None = None, training: dict[str, Any] | None = None) -> Job:
    spec = {
        "algorithm": {"name": "GRPO", "kl": {"coefficient": 0.0}},
        "models": {"actor": {"uri": f"file://{folder}"}, "reward": {"verifier": {"name": "Math", "answerKey": "a"}}},
        "data": {"train": {"uri": "file:///prompts.jsonl"}, "maxPromptTokens": 8, "maxResponseTokens": 8},
        "rollout": {"samplesPerPrompt": 2, **(rollout or {})},
        "training": {"totalSteps": 1, "promptBatchSize": 2, **(training or {})},
    }
    return job(folder, "sums", spec)


@pytest.mark.parametrize(
    ("family", "stages", "chosen", "sentences"),
    [(MIXTURE, 1, "Replay", 0), (MIXTURE, 2, "Recompute", 1), (DENSE, 1, "Recompute", 0)],
)
def test_mixtures_are_replayed_by_generators_without_stages(
    family: str, stages: int, chosen: str, sentences: int, tmp_path: Path
) -> None:
    FAMILIES[family].save_pretrained(tmp_path)
    pool = MappedPool(name="all", models=("actor",), slots_per_machine=(stages,))
    placed = DeviceMapping(device="CPU", pools=(pool,), sizes={"actor": ParallelSizes(data=1, pipeline=stages)})
    said: list[str] = []
    asked = sums(tmp_path)
    assert asked.spec.rollout.routing is None
    found = with_routing(asked, {"actor": str(tmp_path)}, placed, said.append)
    assert found.spec.rollout.routing == chosen
    assert len(said) == sentences


@pytest.mark.parametrize("asked", [{"rollout": {"routing": "Replay"}}, {"training": {"routerAuxLoss": 0.1}}])
def test_a_dense_model_has_no_settings_of_mixtures(asked: dict[str, Any], tmp_path: Path) -> None:
    given = sums(tmp_path, **asked)
    with pytest.raises(SpecError, match=f"spec.{next(iter(asked))}.* is for mixtures of experts, and models.actor has"):
        require_mixtures(given, {"actor": 1, "reference": 1})
    require_mixtures(given, {"actor": 8, "reference": 1})
