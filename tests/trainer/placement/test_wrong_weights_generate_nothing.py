"""A rollout pool that keeps other bits than were sent: the run ends, and the call sent after it generates nothing."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rlhf_api.names import Role
from rlhf_trainer.errors import NumericsError
from rlhf_trainer.generation.vllm_engine import Response
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice
from tests.trainer.placement.sampler import PlainSampler
from tests.trainer.placement.sweep import ROLES, pools_of, run, small_job


class Corrupting(PlainSampler):
    """Keeps one parameter wrong, and leaves a mark if it is asked to generate."""

    def __init__(self, *given: Any, mark: Path, **named: Any) -> None:
        super().__init__(*given, **named)
        self._mark = mark

    def load_weights(self, pieces: Iterable[WeightSlice], holds: Mapping[str, TensorSlice]) -> dict[str, Tensor]:
        sums = super().load_weights(pieces, holds)
        return {**sums, "model.norm.weight": sums["model.norm.weight"] + 1}

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], **options: Any) -> list[Response]:
        self._mark.touch()
        return super().generate(prompts, seeds, **options)


def test_the_call_that_comes_next_is_refused(folders: Mapping[Role, str], tmp_path: Path) -> None:
    mark = tmp_path / "generated"
    job = small_job(tmp_path, "PPO", folders, pools_of([ROLES["PPO"], ["rollout"]], slots=(1, 1)))
    with pytest.raises(NumericsError, match=r"model\.norm\.weight: the generator of rank 1 keeps other bits"):
        run(tmp_path, job, folders, partial(Corrupting, mark=mark))
    assert not mark.exists()
