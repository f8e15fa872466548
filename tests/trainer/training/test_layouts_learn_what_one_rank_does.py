"""Layouts over eight ranks: losses, gradients and weights after two steps are those of one rank.

With epsilon 1 and learning rate 1 a step of AdamW is nearly the gradient itself.
"""

import copy
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
from torch import Tensor
from torch.testing import assert_close

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.telemetry import Report, merge, recorder
from rlhf_trainer.training import sharding
from rlhf_trainer.training.distributed import ModelMesh
from tests.trainer.families import FAMILIES
from tests.trainer.measured import SHARED
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import save_tiny
from tests.trainer.training.test_losses_do_not_depend_on_ranks_micro_batches_or_padding import CASES, worker_of
from tests.trainer.weights import weights_by_pieces

RANKS, STEPS = 8, 2
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("SFT", {}),
    "DPO": ("DPO actor", {}),
    "PPO actor": ("PPO actor", {}),
    "PPO critic": ("PPO critic", {}),
    "GRPO": ("DAPO actor", {}),
    "LoRA": ("SFT", {"lora": {"rank": 4, "alpha": 12}}),
}
"""Algorithm -> (case, options of its model in the manifest)."""
AXES = {"pipeline": (1, 2), "tensor": (1, 2), "expert": (1, 2, 4), "context": (1, 2), "replicas": (1, 2)}
Layout = tuple[int, ...]
"""A size of each axis."""
FAST: dict[Layout, str] = {(1, 1, 1, 1, 2): "GRPO", (2, 1, 4, 1, 1): "SFT", (1, 2, 1, 2, 1): "PPO actor"}
"""Layouts with one size of each axis above 1 at least; the other tests are slow."""


def sizes_of(layout: Layout) -> ParallelSizes:
    """The sizes on eight ranks; ValueError if they do not divide them."""
    sizes: dict[str, Any] = dict(zip(AXES, layout, strict=True))
    found = ParallelSizes(data=RANKS // (sizes["pipeline"] * sizes["tensor"] * sizes["context"]), **sizes)
    assert found.world_size == RANKS
    assert found.expert_shards
    return found


def possible_layouts() -> list[Layout]:
    found = []
    for layout in product(*AXES.values()):
        try:
            sizes_of(layout)
        except ValueError:
            continue
        found.append(layout)
    return found


def test_each_axis_is_cut() -> None:
    assert [max(sizes) > 1 for sizes in zip(*FAST, strict=True)] == [True] * len(AXES)


mesh_of = cache(ModelMesh)
"""Meshes of the kept ranks, as the threads of each group of gloo wake often."""


def learn(algorithm: str, folder: str, layout: ParallelSizes) -> tuple[Report, dict[str, Tensor]]:
    """(what was measured in two steps, on rank 0 the whole weights)."""
    case, of_model = ALGORITHMS[algorithm]
    is_cut = layout.world_size > 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "ModelMesh", mesh_of)
        options: dict[str, Any] = {"budget": 40 if is_cut else 100_000, "share": is_cut, **of_model}
        worker, update = worker_of(case, folder, layout, **options, gradientCheckpointing=layout.context > 1)
    recorder.drain()
    for step in range(1, STEPS + 1):
        update(step)
    return recorder.drain(), weights_by_pieces(worker.trainer.model)


Learnt = tuple[dict[str, float], dict[str, Tensor]]
"""(losses, gradient norms and other measurements, weights)."""


def learnt(algorithm: str, folder: str, layout: ParallelSizes) -> Learnt:
    found = run_kept_ranks(layout.world_size, learn, algorithm, folder, layout)
    record = merge(report for report, _ in found)
    return {name: value for name, value in record.items() if not name.startswith(SHARED)}, found[0][1]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], str]:
    """Return a function for the folder of an algorithm's model, a mixture or a dense one."""

    @cache
    def save(labels: int | None, is_mixture: bool) -> str:
        config = copy.deepcopy(FAMILIES["Qwen3-MoE" if is_mixture else "Llama"])
        return save_tiny(tmp_path_factory.mktemp("model"), seed=3, labels=labels, config=config)

    return lambda algorithm, is_mixture: save(1 if CASES[ALGORITHMS[algorithm][0]][1] == "critic" else None, is_mixture)


@pytest.fixture(scope="module")
def of_one_rank(folder_of: Callable[[str, bool], str]) -> Callable[[str, bool], Learnt]:
    """Return a function for what one rank learns."""
    return cache(
        lambda algorithm, is_mixture: learnt(algorithm, folder_of(algorithm, is_mixture), ParallelSizes(data=1))
    )


@pytest.mark.parametrize(
    ("layout", "algorithm"),
    [
        pytest.param(layout, each, marks=() if FAST.get(layout) == each else pytest.mark.slow)
        for layout in possible_layouts()
        for each in ALGORITHMS
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_a_layout_learns_what_one_rank_does(
    layout: Layout,
    algorithm: str,
    folder_of: Callable[[str, bool], str],
    of_one_rank: Callable[[str, bool], Learnt],
) -> None:
    sizes = sizes_of(layout)
    is_mixture = sizes.expert > 1
    record, weights = learnt(algorithm, folder_of(algorithm, is_mixture), sizes)
    expected, expected_weights = of_one_rank(algorithm, is_mixture)
    assert record == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert_close(weights, expected_weights, rtol=0, atol=5e-6)
