"""What a user reads when a rank has no memory: which call it was, and the option that takes less."""

import pytest
import torch

from rlhf_trainer.controller.slot_process import translated_errors
from rlhf_trainer.errors import MemoryProblem
from tests.each import each_case

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which"


@each_case(
    ("call", "option"),
    [
        ("actor.update_actor", "lower spec.training.microBatchTokens"),
        ("critic", "take more slots, or set spec.models.*.offload"),
        ("actor.generate_sequences", "lower spec.rollout.gpuMemoryUtilization, on CPU spec.data.maxResponseTokens"),
    ],
)
@each_case("error", [torch.OutOfMemoryError(CUDA), MemoryError("Tried to allocate 2.00 GiB.")])
def test_a_call_without_memory_is_one_sentence_with_the_option(call: str, option: str, error: Exception) -> None:
    with pytest.raises(MemoryProblem) as raised, translated_errors(call):
        raise error
    sentence = str(raised.value)
    assert sentence.startswith(f"{call} on rank 0 has not enough memory (")
    assert sentence.endswith(f"Tried to allocate 2.00 GiB); {option}")
