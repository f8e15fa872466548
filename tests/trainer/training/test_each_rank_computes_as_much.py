"""Rows of skewed lengths: data-parallel ranks compute about as many tokens, and every number is that of one rank."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rlhf_api.spec.job_spec import Optimizer
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.training.batching import RowCosts
from rlhf_trainer.training.loading import load_scorer
from rlhf_trainer.training.model_input import TokenBatch
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.sharding import shard
from rlhf_trainer.training.trainer import Trainer
from rlhf_trainer.types import Fields
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import divisible_config, save_tiny
from tests.trainer.weights import weights_on_first_rank

LENGTHS = torch.tensor([60, 58, 55, 41, 6, 5, 9, 5])
Seen = tuple[int, Tensor, float, dict[str, Tensor]]
"""(tokens that this rank computed in an update, scores of its rows, gradient norm, on rank 0 the weights)."""


PROMPT = 4
"""Tokens that the first four rows have in common, and the other four."""


def texts_of(micro: Fields) -> list[TokenBatch]:
    return [TokenBatch(tokens=micro["tokens"], lengths=micro["mask"].sum(1).long())]


def learn(folder: str, layout: ParallelSizes, token_budget: int = 64, share_prompts: bool = False) -> Seen:
    """Score this rank's rows, as wide as its longest, and learn from them."""
    rows = THREE_D_PROTO.distribute(layout, len(LENGTHS))[torch.distributed.get_rank()]
    lengths = LENGTHS[rows.start : rows.stop]
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).float()
    tokens = torch.randint(3, 500, (8, 60), generator=torch.Generator().manual_seed(1))
    tokens[:, :PROMPT] = torch.tensor([[3], [4]]).repeat_interleave(4, 0)
    own = tokens[rows.start : rows.stop, : mask.shape[1]] * mask.long()
    fields = {"tokens": own, "mask": mask, "goal": lengths.float()}
    model = load_scorer(folder, seed=0, trust_remote_code=False, revision=None, path="")
    trainer = Trainer(
        shard(model, layout, compute_dtype=torch.float32, recompute_activations=False),
        token_budget=token_budget,
        optimizer=Optimizer(learning_rate=1.0, epsilon=1.0),
        total_steps=10,
        max_skipped_updates=0,
        path="models.critic",
        role="critic",
        offload="None",
        attention="Auto",
        share_prompts=share_prompts,
    )
    computed = []

    def loss(scores: Tensor, micro: Fields) -> Tensor:
        computed.append(int(micro["mask"].sum()))
        return ((scores.tanh() - micro["goal"][:, None] / 60).square() * micro["mask"]).sum() / int(LENGTHS.sum())

    scores = trainer.infer(fields, texts_of, lambda scores, _: scores) * mask
    norm = trainer.update(fields, texts_of, loss, step=1)
    return sum(computed), scores, norm, weights_on_first_rank(trainer.model)


def costs(folder: str, layout: ParallelSizes) -> list[int]:
    """Of a row of one token and of one of ten."""
    model = load_scorer(folder, seed=0, trust_remote_code=False, revision=None, path="")
    sharded = shard(model, layout, compute_dtype=torch.float32, recompute_activations=False)
    return RowCosts(inner(sharded.module)).of(torch.tensor([1, 10])).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), seed=3, labels=1, config=divisible_config())


@pytest.fixture(scope="module")
def alone(model: str) -> Seen:
    seen: Seen = run_kept_ranks(1, learn, model, ParallelSizes(data=1))[0]
    return seen


@pytest.mark.parametrize(
    "layout",
    [ParallelSizes(data=2), ParallelSizes(data=4, replicas=2), ParallelSizes(data=2, pipeline=2)],
    ids=["two ranks", "two replicas", "two stages"],
)
def test_ranks_compute_as_much_and_what_one_rank_computes(layout: ParallelSizes, model: str, alone: Seen) -> None:
    check_ranks(layout, alone, run_kept_ranks(layout.world_size, learn, model, layout))


def test_ranks_that_hold_one_group_each_compute_as_much(model: str, alone: Seen) -> None:
    layout = ParallelSizes(data=2)
    check_ranks(layout, alone, run_kept_ranks(2, learn, model, layout, 256, True))


def check_ranks(layout: ParallelSizes, alone: Seen, seen: Sequence[Seen]) -> None:
    """The ranks hold unequal shares, compute about equal ones, and get the numbers of one rank alone."""
    every = [seen[ranks[0]] for ranks in THREE_D_PROTO.collect(layout)]
    total, ranks = int(LENGTHS.sum()), layout.data
    held = [int(LENGTHS[start:stop].sum()) for start, stop in pairwise([*range(0, 8, 8 // ranks), 8])]
    computed = [tokens for tokens, *_ in every]
    assert sum(computed) == total
    assert max(held) > 1.7 * total / ranks, "the ranks hold unequal shares"
    assert max(computed) <= 1.1 * total / ranks
    width = alone[1].shape[1]
    scores = torch.cat([torch.nn.functional.pad(each[1], (0, width - each[1].shape[1])) for each in every])
    torch.testing.assert_close(scores, alone[1], rtol=0, atol=1e-5)
    assert seen[0][2] == pytest.approx(alone[2], rel=1e-5)
    for name, weight in alone[3].items():
        torch.testing.assert_close(seen[0][3][name], weight, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("layout", [ParallelSizes(data=2), ParallelSizes(data=1, tensor=2)], ids=str)
def test_the_cost_of_a_row_is_half_of_a_layers_flops_by_hand(layout: ParallelSizes, model: str) -> None:
    """Hidden 64, 8 heads of 8 (4 of keys and values), 128 inside the MLP.

    A product of n numbers is 2 n FLOPs. Token i is multiplied with the weights, and with i keys and i values in each
    head: up to token L that is L^2 / 2 times 2 x 64 numbers.
    """
    weights = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64  # with the gains of two norms
    ranks = run_kept_ranks(2, costs, model, layout)
    assert ranks == [[weights + 64, 10 * weights + 10**2 * 64]] * 2
