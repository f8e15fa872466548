"""An actor whose shards leave the device generates: in what order weights, shards and cache come and go."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_api.files import load
from rlhf_trainer.generation.vllm_engine import Response
from rlhf_trainer.run.worker_specs import setting_of
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice
from rlhf_trainer.training.offload import bytes_held
from rlhf_trainer.types import Batch
from rlhf_trainer.workers import rollout
from rlhf_trainer.workers.generating_actor import GeneratingActor
from tests.examples.test_every_example_is_right import EXAMPLES, FINISHED
from tests.trainer.ranks import run_ranks
from tests.trainer.stand_in import GeneratorStandIn
from tests.trainer.tiny import save_tiny

Event = tuple[str, int]
"""What the generator did, and the bytes of the actor's shards on the device then."""


class Watching(GeneratorStandIn):
    """Stands where vLLM would, and writes down what it is asked to do."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.events: list[Event] = []
        self.actor: Any = None

    def load_weights(self, pieces: Iterable[WeightSlice], holds: Mapping[str, TensorSlice]) -> dict[str, Tensor]:
        sums = super().load_weights(pieces, holds)
        self._note("weights")
        return sums

    def wake_cache(self) -> None:
        self._note("cache")

    def sleep(self) -> int:
        self._note("sleep")
        return super().sleep()

    def generate(self, prompts: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[Response]:
        self._note("generate")
        return [Response(tokens=[5, 2], log_probs=[-1.0, -1.0], finished=True, versions=[0, 0]) for _ in prompts]

    def _note(self, what: str) -> None:
        self.events.append((what, bytes_held(self.actor.trainer.model.module.parameters())))


def life(path: Path, folder: str, offload: str) -> tuple[list[Event], int]:
    """Two batches of one policy version, an update, and a batch of the next."""
    setattr(rollout, "GenerationEngine", Watching)  # noqa: B010
    (job,) = load(path, ["training.totalSteps=2", f"models.actor.offload={offload}"], FINISHED)
    actor = GeneratingActor(setting_of(job, "actor", {"actor": folder}), max_sequences=2)
    assert actor.generation
    generator: Any = actor.generation.engine
    generator.actor = actor
    prompts = {
        "prompt_ids": torch.ones(2, 3, dtype=torch.int64),
        "prompt_mask": torch.ones(2, 3),
        "valid": torch.ones(2),
    }
    batch = Batch(step=1, start=0, size=2, fields=prompts)
    for _ in range(2):
        actor.generate_sequences(batch)
    with actor.next_policy():
        whole = bytes_held(actor.trainer.model.module.parameters())
    actor.generate_sequences(batch)
    return generator.events, whole


@pytest.mark.parametrize("offload", ["None", "All"])
def test_weights_copy_leave_cache(offload: str, tmp_path: Path) -> None:
    path = next(path for path in EXAMPLES if "remax" in path.name)
    ((events, whole),) = run_ranks(1, life, path, save_tiny(tmp_path, seed=3), offload)
    rest = whole * (offload == "None")
    wakes = [("weights", whole), ("cache", rest), ("generate", rest)]
    assert whole > 0
    assert events == [*wakes, ("generate", rest), ("sleep", rest), *wakes]
