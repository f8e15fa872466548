"""The choice of `rollout.routing` that a manifest leaves open."""

from pathlib import Path

import pytest

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.mapping import DeviceMapping, MappedPool
from rlhf_trainer.run.worker_specs import with_routing
from tests.trainer.families import FAMILIES
from tests.trainer.jobs import job

MIXTURE, DENSE = "Qwen3-MoE", "Llama"


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
    spec = {
        "algorithm": {"name": "GRPO", "kl": {"coefficient": 0.0}},
        "models": {"actor": {"uri": f"file://{tmp_path}"}, "reward": {"verifier": {"name": "Math", "answerKey": "a"}}},
        "data": {"train": {"uri": "file:///prompts.jsonl"}, "maxPromptTokens": 8, "maxResponseTokens": 8},
        "rollout": {"samplesPerPrompt": 2},
        "training": {"totalSteps": 1, "promptBatchSize": 2},
    }
    asked = job(tmp_path, "sums", spec)
    assert asked.spec.rollout.routing is None
    found = with_routing(asked, {"actor": str(tmp_path)}, placed, said.append)
    assert found.spec.rollout.routing == chosen
    assert len(said) == sentences
