"""The generator gets W + s B A, of which each rank makes its own shard, and no rank a whole matrix."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.generation.checksum import bit_sum
from rlhf_trainer.hybrid_engine.hybrid_engine import HybridEngine
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice
from rlhf_trainer.training.loading import load_tokenizer
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.saving import save_model
from tests.trainer.hybrid_engine.baselines import assembled
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import divisible_config, save_tiny
from tests.trainer.training.test_an_adapter_is_trained_beside_frozen_weights import train, trainer_of


class Kept:
    """Takes the place of a generator, and keeps what it is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self.weights, self.shards = dtype, dict[str, Tensor](), dict[str, TensorSlice]()

    def load_weights(self, pieces: Iterator[WeightSlice], shards: Mapping[str, TensorSlice]) -> dict[str, Tensor]:
        self.shards, self.weights = dict(shards), assembled(pieces, shards, torch.empty(0, dtype=self._dtype))
        return {name: bit_sum(each) for name, each in self.weights.items()}


class Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The shapes of all tensors that are made on this rank."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = (each for each in tree_leaves(result) if isinstance(each, Tensor) and not isinstance(each, DTensor))
        self.made |= {tuple(each.shape) for each in leaves}
        return result


def generate_with(
    folder: str, output: str, layout: ParallelSizes, dtype: torch.dtype
) -> tuple[int, set[tuple[int, ...]]]:
    """Two updates and a reshard after each: (parameters whose shards are those of the merged model, shapes made)."""
    trainer, kept = trainer_of(folder, layout, dtype), Kept(dtype)
    engine = HybridEngine(
        trainer.model,
        kept,  # type: ignore[arg-type]
        config=inner(trainer.model.module).config,
        dtype=trainer.model.compute_dtype,
        trust_remote_code=False,
    )
    for step in (1, 2):
        train(trainer, range(step, step + 1))
        with Shapes() as shapes:
            engine.to_generation()
    tokenizer = load_tokenizer(folder, trust_remote_code=False, revision=None)
    save_model(trainer.model, tokenizer, Path(output) / "model")
    merged = load_file(f"{output}/model/model.safetensors")
    for name, part in kept.shards.items():
        expected = merged[name][part.within(TensorSlice.whole(tuple(merged[name].shape)))].to(dtype)
        rtol, atol = (0.0, 1e-6) if dtype == torch.float32 else (2**-7, 1e-4)
        torch.testing.assert_close(kept.weights[name], expected, rtol=rtol, atol=atol)
    return len(kept.shards), shapes.made


CASES = {
    "1-1-2": ParallelSizes(data=2, generation_tensor=1),
    "2-2-1 to 1-1": ParallelSizes(data=1, pipeline=2, tensor=2, generation_pipeline=1, generation_tensor=1),
    "1-2-2 in 2 replicas to 1-2": ParallelSizes(data=2, replicas=2, tensor=2, generation_tensor=2),
    "1-2-2 to 1-1": ParallelSizes(data=2, tensor=2, generation_tensor=1),
    "1-1-3": ParallelSizes(data=3, generation_tensor=1),
}
WHOLE = {(128, 64), (64, 128)}
FAST = ("1-1-2",)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_every_rank_gets_its_shard_of_the_merged_model(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    layout = CASES[name]
    folder = save_tiny(tmp_path / "base", seed=3, config=divisible_config())
    for shards, _ in run_kept_ranks(layout.world_size, generate_with, folder, str(tmp_path), layout, dtype):
        assert shards == 4 * 9 + 2  # the head is the embedding


def test_no_rank_makes_a_whole_matrix(tmp_path: Path) -> None:
    layout = ParallelSizes(data=1, tensor=2, generation_tensor=2)
    folder = save_tiny(tmp_path / "base", seed=3, config=divisible_config())
    weights = load_file(f"{folder}/model.safetensors")
    assert {tuple(weights[f"model.layers.0.mlp.{name}_proj.weight"].shape) for name in ("up", "down")} == WHOLE
    for _, made in run_kept_ranks(2, generate_with, folder, str(tmp_path), layout, torch.float32):
        assert (64, 64) in made  # half of each of them
        assert not made & WHOLE
