"""The largest tensors and the peak of an update, counted op by op: they do not grow with tokens x vocabulary.

Nor has a rank more than its part of the vocabulary.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.training import head
from rlhf_trainer.training.attention import use_attention
from rlhf_trainer.training.model_input import ModelInput, TokenBatch
from rlhf_trainer.training.models import LanguageModel
from rlhf_trainer.training.sharding import shard
from tests.real_size.live_bytes import LiveBytes
from tests.trainer.ranks import run_ranks

VOCABULARY, CHUNK = 8191, 8
"""A vocabulary that 2 ranks cannot share evenly; the most rows of a chunk on one rank."""
PARTS = (4096, 4095)
PADDING = 5000
"""A token of the second rank whose embedding learns nothing as an input."""


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that ops made and that are alive, the rows of logits and those of weights."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = LiveBytes()
        self.wide: dict[int, int] = {}
        self.tall: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its ops on local tensors are counted
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor):  # by which DTensor works out shapes
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        self.live.seen(tensor)
        if tensor.dim() > 1 and tensor.shape[-1] in (VOCABULARY, *PARTS):
            rows = tensor.numel() // tensor.shape[-1]
            self.wide[tensor.shape[-1]] = max(rows, self.wide.get(tensor.shape[-1], 0))
        if tensor.dim() == 2 and tensor.shape[0] in (VOCABULARY, *PARTS):
            self.tall.add(tensor.shape[0])


class Counted(NamedTuple):
    peak: int
    """Bytes."""
    wide: dict[int, int]
    """The vocabulary or a rank's part of it, as the last dimension -> the most rows of a tensor that has it."""
    tall: set[int]
    """Sizes of the vocabulary or a rank's part of it that are the first dimension of a matrix, such as a gradient."""


def update(tensor: int, tokens: int, *, tied: bool) -> tuple[Counted, Tensor, Tensor]:
    """(what was counted, log-probabilities, the embedding's gradient) of one forward and backward pass."""
    head.CPU_CHUNK_LOGITS = VOCABULARY * CHUNK
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        pad_token_id=PADDING,
    )
    torch.manual_seed(0)
    model = LanguageModel(AutoModelForCausalLM.from_config(config))
    layout = ParallelSizes(data=1, tensor=tensor)
    use_attention(model.causal_lm, "Auto", device=torch.device("cpu"), dtype=torch.float32)
    sharded = shard(model, layout, compute_dtype=torch.float32, recompute_activations=False)
    ids = torch.randint(VOCABULARY, (2, tokens // 2), generator=torch.Generator().manual_seed(1))
    ids[0, 3] = PADDING
    lengths = torch.full((2,), tokens // 2)
    given = ModelInput.of([TokenBatch(tokens=ids, lengths=lengths, read=torch.ones(ids.shape), entropy=True)])
    with Counting() as counting:
        found = sharded.module(given.tokens, given)
        (found.log_probs - 0.1 * found.entropy).square().mean().backward()
    embedding: Any = model.causal_lm.get_input_embeddings()
    counted = Counted(counting.live.phase.host_peak, counting.wide, counting.tall)
    return counted, found.log_probs.detach(), embedding.weight.grad.full_tensor()


def both_lengths(tensor: int, tied: bool) -> Any:
    return [update(tensor, tokens, tied=tied) for tokens in (64, 512)]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def passes(request: pytest.FixtureRequest) -> dict[int, Any]:
    """What each rank counted and computed on 64 and on 512 tokens, by the ranks that share the vocabulary."""
    return {tensor: run_ranks(tensor, both_lengths, tensor, request.param) for tensor in (1, 2)}


def test_the_peak_does_not_grow_with_tokens_times_vocabulary(passes: dict[int, Any]) -> None:
    for ranks in passes.values():
        for (few, _, _), (many, _, _) in ranks:
            assert many.peak - few.peak < 0.05 * (512 - 64) * VOCABULARY * 4


def test_a_tensor_as_wide_as_the_vocabulary_has_a_chunks_rows(passes: dict[int, Any]) -> None:
    [[_, (alone, _, _)]] = passes[1]
    assert alone.wide == {VOCABULARY: CHUNK}
    for rank, (_, (shared, _, _)) in enumerate(passes[2]):
        assert shared.wide == {PARTS[rank]: VOCABULARY * CHUNK // PARTS[rank]}


def test_a_rank_has_the_gradient_of_its_part_of_the_vocabulary(passes: dict[int, Any]) -> None:
    assert {tuple(counted.tall) for [(counted, _, _), _] in passes[1]} == {(VOCABULARY,)}
    assert [counted.tall for [(counted, _, _), _] in passes[2]] == [{part} for part in PARTS]


def test_ranks_that_share_the_vocabulary_compute_the_same(passes: dict[int, Any]) -> None:
    [[_, (_, log_probs, gradient)]] = passes[1]
    for _, (_, found, found_gradient) in passes[2]:
        torch.testing.assert_close(found, log_probs, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(found_gradient, gradient, atol=1e-5, rtol=1e-5)
