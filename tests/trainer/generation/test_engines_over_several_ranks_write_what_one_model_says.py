"""Engines on the ranks that a layout picks, given weights as slices, against transformers on one process at float32.

Greedy tokens must be equal, except from a position on where the two best logits are closer than 1e-4: 2 % of the rows
at most. Prompts are long enough to be cached, so that a cache from before an update would show.
"""

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.tensor_slice import TensorSlice
from tests.trainer.generation.conftest import RunRanks
from tests.trainer.generation.engines import build, cut, texts
from tests.trainer.generation.models import (
    FAMILIES,
    MIXTURES,
    OF_TRANSFORMERS,
    model_of,
    prompts,
    save_config,
    weights_of,
)

TOO_CLOSE = 1e-4
SEEDS = (1, 2)


def tensor_groups(layout: ParallelSizes) -> list[list[int]]:
    """The tensor groups of every engine, its stages one after the other."""
    axes = ("data", "micro", "generation_pipeline", "generation_tensor")
    places = {rank: layout.coordinates(rank) for rank in range(layout.world_size)}
    ranks = sorted(places, key=lambda rank: [places[rank][axis] for axis in axes])  # type: ignore[index]
    size = layout.generation_tensor
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


def generate(folder: str, layout: ParallelSizes, stage_layers: tuple[int, ...]) -> dict[str, Any]:
    """What this rank's engine writes under the weights of each seed, before and after a sleep."""
    groups = tensor_groups(layout)
    state = torch.random.get_rng_state()
    engine = build(folder, groups, stage_layers)
    stages = layout.generation_pipeline
    index = next(place for place, group in enumerate(groups) if int(os.environ["RANK"]) in group) // stages
    holds = engine.held_shards()
    answers: dict[str, Any] = {"engine": index, "holds": holds, "sums": [], "greedy": [], "built": engine.bytes_held()}
    asked = prompts(index)
    for seed in SEEDS:
        weights = weights_of(folder, seed)
        answers["sums"].append(engine.load_weights(cut(weights, holds), holds))
        engine.wake_cache()
        answers["greedy"].append(texts(engine, asked, greedy=True))
        answers["sampled"] = texts(engine, asked, greedy=False)
    answers["held"] = engine.bytes_held()
    answers["freed"] = engine.sleep()
    answers["asleep"] = engine.bytes_held()
    engine.load_weights(cut(weights, holds), holds)
    answers["weights"] = engine.bytes_held()
    engine.wake_cache()
    answers["woken"] = texts(engine, asked, greedy=True)
    answers["held again"] = engine.bytes_held()
    answers["left in memory"] = names_in_shared_memory()
    assert torch.equal(torch.random.get_rng_state(), state), "generation moved the trainer's random state"
    return answers


def names_in_shared_memory() -> list[str]:
    """Of this start's groups, and of the queues that vLLM's groups may have."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    queues = [group.unique_name for group in (get_tp_group(), get_pp_group()) if group.mq_broadcaster]
    return [path.name for path in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}*")] + queues


NORMAL = {
    "llama 1-4-1, t_g 2": ("llama", ParallelSizes(data=1, tensor=4, generation_tensor=2), ()),
    "qwen3 2-1-1, p_g 2": ("qwen3", ParallelSizes(data=1, pipeline=2), (2, 1)),
    "qwen2 moe 1-2-1, t_g 2": ("qwen2 moe", ParallelSizes(data=1, tensor=2), ()),
}
SLOW = {
    "one key head 1-2-1, t_g 2": ("one key head", ParallelSizes(data=1, tensor=2), ()),
    "qwen3 moe 1-1-1": ("qwen3 moe", ParallelSizes(data=1), ()),
    **{
        f"{family} 1-4-1, t_g {size}": (family, ParallelSizes(data=1, tensor=4, generation_tensor=size), ())
        for family, size in product(MIXTURES, (1, 2))
    },
    "qwen2 tied 1-2-1, t_g 1": ("qwen2 tied", ParallelSizes(data=1, tensor=2, generation_tensor=1), ()),
    **{
        f"{family} 1-4-1, t_g {size}": (family, ParallelSizes(data=1, tensor=4, generation_tensor=size), ())
        for family, size in product(FAMILIES, (1, 2, 4))
    },
    **{
        f"{family} 2-2-1, p_g 2, t_g {size}": (
            family,
            ParallelSizes(data=1, pipeline=2, tensor=2, generation_tensor=size),
            (1, 2),
        )
        for family, size in product(FAMILIES, (1, 2))
    },
    **{
        f"{family} 1-2-1, t_g {size}": (family, ParallelSizes(data=1, tensor=2, generation_tensor=size), ())
        for family, size in product(OF_TRANSFORMERS, (1, 2))
    },
    "llama 1-2-2, t_g 2": ("llama", ParallelSizes(data=2, tensor=2), ()),
}
CASES = [*NORMAL, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW if name not in NORMAL)]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, vllm_ranks: RunRanks) -> Any:
    """(folder, layout, the answers of each rank)."""
    family, layout, stage_layers = (NORMAL | SLOW)[request.param]
    folder = save_config(tmp_path_factory.mktemp("model"), family)
    return folder, layout, vllm_ranks(layout.world_size, generate, folder, layout, stage_layers)


def test_greedy_tokens_are_those_of_transformers(case: Any) -> None:
    folder, _, ranks = case
    close = rows = 0
    for place, seed in enumerate(SEEDS):
        model = model_of(folder, seed)
        for index in {rank["engine"] for rank in ranks}:
            written = next(rank["greedy"][place] for rank in ranks if rank["engine"] == index)
            for prompt, tokens in zip(prompts(index), written, strict=True):
                rows += 1
                close += differs_where_two_are_close(model, prompt, tokens)
    assert close <= 0.02 * rows


def differs_where_two_are_close(model: Any, prompt: list[int], tokens: list[int]) -> bool:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    wrong = (logits.argmax(-1) != torch.tensor(tokens)).nonzero()
    if not len(wrong):
        return False
    best = logits[int(wrong[0])].topk(2).values
    assert float(best[0] - best[1]) < TOO_CLOSE
    return True


def test_the_weights_of_another_seed_write_something_else(case: Any) -> None:
    """Else equality after an update would prove nothing."""
    for rank in case[2]:
        first, second = rank["greedy"]
        assert sum(map(list.__ne__, first, second)) > 0.9 * len(first)


def test_all_ranks_of_an_engine_write_the_same(case: Any) -> None:
    _, layout, ranks = case
    groups = tensor_groups(layout)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for rank in ranks:
        first = next(other for other in ranks if other["engine"] == rank["engine"])
        assert rank["sampled"] == first["sampled"]
        assert rank["greedy"] == first["greedy"]


def test_what_was_written_has_the_bits_of_the_source(case: Any) -> None:
    folder, _, ranks = case
    for place, seed in enumerate(SEEDS):
        weights = weights_of(folder, seed)
        for rank in ranks:
            for name, part in rank["holds"].items():
                there = weights[name][part.within(TensorSlice.whole(tuple(weights[name].shape)))]
                assert rank["sums"][place][name] == int(there.contiguous().view(torch.int32).sum(dtype=torch.int64))


def test_an_engine_holds_every_element(case: Any) -> None:
    """The ranks of an engine together hold the model, replicated parameters and heads of keys and values more often."""
    folder, _, ranks = case
    weights = weights_of(folder, 1)
    for index in {rank["engine"] for rank in ranks}:
        counts = {name: torch.zeros(weight.shape) for name, weight in weights.items()}
        for rank in ranks:
            for name, part in rank["holds"].items() if rank["engine"] == index else ():
                counts[name][part.within(TensorSlice.whole(tuple(weights[name].shape)))] += 1
        for name, count in counts.items():
            assert count.min() == count.max() >= 1, name
            if "q_proj" in name or "down_proj" in name:
                assert count.max() == 1


def test_an_engine_sleeps_when_built_and_frees_its_memory(case: Any) -> None:
    for rank in case[2]:
        assert rank["built"] == 0
        assert rank["asleep"] == 0
        assert rank["freed"] == rank["held"] == rank["held again"]
        assert rank["woken"] == rank["greedy"][-1]
        assert 0 < rank["weights"] < rank["held"], "the cache comes after the weights"


def test_nothing_of_an_engine_has_a_name_in_shared_memory(case: Any) -> None:
    """So nothing is left behind when a rank is killed, and no two jobs can mistake one another's."""
    assert not [name for rank in case[2] for name in rank["left in memory"]]
