"""Bytes of an update's collectives between ranks that share a row, beside formulas."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import MistralConfig

from rlhf_api.spec.parallel_sizes import ParallelSizes
from tests.trainer.families import SIZES
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import save_tiny
from tests.trainer.training.test_an_update_is_one_step_and_one_reduction import LENGTHS, trainer_of, update

N, LAYERS, HIDDEN, SIZE, FLOAT, RANKS = int(LENGTHS.sum()), 2, 64, 32, 4, 2
EXCHANGED, GATHERED, SCATTERED, SUMMED = "exchanged", "gathered", "scattered", "summed"
OPERATIONS = {
    "c10d::alltoall_base_": EXCHANGED,
    "c10d::_allgather_base_": GATHERED,
    "c10d::_reduce_scatter_base_": SCATTERED,
    "c10d::allreduce_": SUMMED,
    "_c10d_functional::all_gather_into_tensor": GATHERED,
    "_c10d_functional::reduce_scatter_tensor": SCATTERED,
    "_c10d_functional::all_reduce": SUMMED,
}


class Bytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that a rank gives to collectives, by kind; flat tensors, which are weights and counts, are left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        if name in OPERATIONS and tensors[-1].dim() > 1:  # the output comes first, if it is given
            self.given[OPERATIONS[name]] += tensors[-1].nbytes
        return function(*args, **(kwargs or {}))


def bytes_of_an_update(folder: str, layout: ParallelSizes) -> Counter[str]:
    trainer = trainer_of(folder, layout, token_budget=100)
    update(trainer, 1)
    counted = Bytes()
    with counted:
        update(trainer, 2)
    return counted.given


def given(tmp_path: Path, layout: ParallelSizes, **heads: int) -> Counter[str]:
    folder = save_tiny(tmp_path, seed=3, labels=1, config=MistralConfig(**SIZES | heads, sliding_window=None))
    found: list[Counter[str]] = run_kept_ranks(RANKS, bytes_of_an_update, folder, layout)
    assert found[0] == found[1]
    return found[0]


SCORES = len(LENGTHS) * int(LENGTHS.max()) * FLOAT


@pytest.mark.parametrize(("kv_heads", "sent"), [(2, 2), (1, 2)])
def test_heads_are_exchanged_for_tokens(kv_heads: int, sent: int, tmp_path: Path) -> None:
    """Queries, keys, values and the output, forward and backward; one key head is sent to both ranks."""
    heads = 2 * 4 + 2 * sent
    found = given(tmp_path, ParallelSizes(data=1, context=RANKS), num_key_value_heads=kv_heads)
    assert found == {EXCHANGED: LAYERS * 2 * heads * SIZE * N // RANKS * FLOAT, SUMMED: SCORES}


def test_keys_are_gathered_where_heads_do_not_divide(tmp_path: Path) -> None:
    found = given(tmp_path, ParallelSizes(data=1, context=RANKS), num_attention_heads=3, num_key_value_heads=1)
    keys_and_values = LAYERS * 2 * SIZE * N * FLOAT
    assert found == {GATHERED: keys_and_values // RANKS, SCATTERED: keys_and_values, SUMMED: SCORES}


def test_tensor_parallel_ranks_gather_and_scatter_tokens(tmp_path: Path) -> None:
    """Two blocks a layer, forward and backward; the embedding scatters, and the final norm gathers."""
    hidden = N * HIDDEN * FLOAT
    found = given(tmp_path, ParallelSizes(data=1, tensor=RANKS))
    assert found == {GATHERED: (4 * LAYERS + 2) * hidden // RANKS, SCATTERED: (4 * LAYERS + 1) * hidden}
