"""A vLLM with another layout is refused before it generates, and an update that does not come whole names its gap."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_trainer.errors import EnvironmentProblem, TrainerError
from rlhf_trainer.tensor_slice import TensorSlice
from tests.trainer.generation.conftest import RunRanks
from tests.trainer.generation.engines import build, cut, texts
from tests.trainer.generation.models import model_of, prompts, save_config

GROUPS = [[0, 1]]
FOREIGN = TensorSlice((0,), (1,))


def swap_gate_and_up(patch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models.llama import LlamaForCausalLM

    fused = {**LlamaForCausalLM.packed_modules_mapping, "gate_up_proj": ["up_proj", "gate_proj"]}
    patch.setattr(LlamaForCausalLM, "packed_modules_mapping", fused)


def take_shards_from_the_last(patch: pytest.MonkeyPatch) -> None:
    from rlhf_trainer.generation.weight_layout import RowRange

    shard = RowRange.shard
    patch.setattr(RowRange, "shard", lambda total, index, count: shard(total, count - 1 - index, count))


def leave_a_row_out(patch: pytest.MonkeyPatch) -> None:
    change_rows(patch, "RowParallelLinear", lambda rows, new: new(rows.start, rows.stop - 1, rows.total))


def move_the_vocabulary(patch: pytest.MonkeyPatch) -> None:
    change_rows(patch, "VocabParallelEmbedding", lambda rows, new: new(rows.start + 1, rows.stop + 1, rows.total + 2))


def change_rows(patch: pytest.MonkeyPatch, kind: str, change: Callable[[Any, Any], Any]) -> None:
    from rlhf_trainer.generation import weight_layout

    plain = weight_layout.row_ranges

    def changed(module: Any) -> list[weight_layout.RowRange]:
        rows = plain(module)
        return [change(each, weight_layout.RowRange) for each in rows] if type(module).__name__ == kind else rows

    patch.setattr(weight_layout, "row_ranges", changed)


def know_no_embeddings(patch: pytest.MonkeyPatch) -> None:
    from rlhf_trainer.generation import weight_layout

    patch.setattr(weight_layout, "VocabParallelEmbedding", type("AnotherEmbedding", (), {}))


MUTATIONS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    swap_gate_and_up: "keeps model.layers.0.mlp.up_proj.weight elsewhere",
    take_shards_from_the_last: "keeps model.layers.0.self_attn.q_proj.weight elsewhere",
    leave_a_row_out: "keeps 128 rows where model.layers.0.self_attn.o_proj.weight lies, and this trainer knows 127",
    move_the_vocabulary: "does not load parameters of these names and shapes",
    know_no_embeddings: "keeps model.embed_tokens in a VocabParallelEmbedding",
}

Pieces = list[Any]
Update = tuple[Pieces, dict[str, TensorSlice]]
GATE = "model.layers.1.mlp.gate_proj.weight"
NORM = "model.norm.weight"


def drop_one(pieces: Pieces, holds: dict[str, TensorSlice]) -> Update:
    lost = next(place for place, piece in enumerate(pieces) if piece[0] == GATE)
    return pieces[:lost] + pieces[lost + 1 :], holds


def double_one(pieces: Pieces, holds: dict[str, TensorSlice]) -> Update:
    return pieces + [piece for piece in pieces if piece[0] == NORM][:1], holds


def double_one_for_another(pieces: Pieces, holds: dict[str, TensorSlice]) -> Update:
    """As many elements as there should be, one piece twice and another not at all."""
    gate = [piece for piece in pieces if piece[0] == GATE]
    rest = [piece for piece in pieces if piece[0] != GATE]
    same = [piece for piece in gate if piece[1].shape == gate[0][1].shape]
    return rest + gate[1:] + same[-1:], holds


def send_a_foreign_slice(pieces: Pieces, holds: dict[str, TensorSlice]) -> Update:
    name, part, tensor = next(piece for piece in pieces if piece[0] == NORM)
    beyond = TensorSlice((part.starts[0] + 128,), (part.stops[0] + 128,))
    return [*pieces, (name, beyond, tensor)], holds


def send_an_unknown_name(pieces: Pieces, holds: dict[str, TensorSlice]) -> Update:
    return [*pieces, ("model.layers.9.mlp.gate_proj.weight", FOREIGN, pieces[0][2])], holds


def hold_something_else(pieces: Pieces, holds: dict[str, TensorSlice]) -> Update:
    return pieces, {**holds, NORM: FOREIGN}


def forget_a_parameter(pieces: Pieces, holds: dict[str, TensorSlice]) -> Update:
    return pieces, {name: part for name, part in holds.items() if name != NORM}


UPDATES: dict[Callable[[Pieces, dict[str, TensorSlice]], Update], str] = {
    drop_one: f"{GATE}: 2048 of 12288 elements did not come",
    double_one: f"{NORM}: elements of",
    double_one_for_another: f"{GATE}: elements of",
    send_a_foreign_slice: f"{NORM}: the piece",
    send_an_unknown_name: "model.layers.9.mlp.gate_proj.weight: a piece of it came",
    hold_something_else: f"{NORM}: the layout of generation is",
    forget_a_parameter: f"{NORM}: the layout of generation is None",
}


def refusals(folder: str) -> tuple[dict[str, str], list[list[int]]]:
    """What is said about each mutation and each wrong update, by name, and what is written after a right one."""
    said = {}
    for mutation in MUTATIONS:
        with pytest.MonkeyPatch.context() as patch:
            mutation(patch)
            with pytest.raises(EnvironmentProblem) as refused:
                build(folder, GROUPS)
        said[mutation.__name__] = str(refused.value)
    engine = build(folder, GROUPS)
    holds = engine.held_shards()
    weights = {name: weight.detach() for name, weight in model_of(folder, 1).named_parameters()}
    pieces = list(cut(weights, holds))
    for change in UPDATES:
        with pytest.raises(TrainerError) as refused_update:
            engine.load_weights(*change(pieces, holds))
        said[change.__name__] = str(refused_update.value)
    engine.load_weights(pieces, holds)
    with pytest.raises(TrainerError) as asleep:
        texts(engine, prompts(0), greedy=True)
    said["asleep"] = str(asleep.value)
    engine.wake_cache()
    return said, texts(engine, prompts(0), greedy=True)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, vllm_ranks: RunRanks) -> Any:
    folder = save_config(tmp_path_factory.mktemp("model"), "llama")
    return folder, vllm_ranks(2, refusals, folder)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_another_layout_than_ours_is_refused_at_the_start(answers: Any, mutation: Any) -> None:
    for said, _ in answers[1]:
        assert said[mutation.__name__].startswith("vLLM ")
        assert MUTATIONS[mutation] in said[mutation.__name__]


def refusal_of_experts(folder: str) -> str:
    from rlhf_trainer.generation import weight_layout

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_layout, "PLAIN", set())
        with pytest.raises(EnvironmentProblem) as refused:
            build(folder, [[0]])
    return str(refused.value)


def test_unknown_expert_kernels_are_refused_at_the_start(tmp_path: Path, vllm_ranks: RunRanks) -> None:
    (said,) = vllm_ranks(1, refusal_of_experts, save_config(tmp_path, "qwen3 moe"))
    assert re.match(r"vLLM \S+ keeps model\.layers\.0\.mlp\.experts\.\w+ in a RoutedExperts, and this trainer", said)


@pytest.mark.parametrize("change", UPDATES, ids=lambda change: change.__name__)
def test_an_update_that_is_not_whole_names_the_parameter(answers: Any, change: Any) -> None:
    for said, _ in answers[1]:
        assert said[change.__name__].startswith(UPDATES[change])


def test_an_engine_whose_cache_sleeps_says_so(answers: Any) -> None:
    sentence = "the generator sleeps; load_weights and then wake_cache wake it"
    assert {said["asleep"] for said, _ in answers[1]} == {sentence}


def test_the_right_update_goes_through_after_all(answers: Any) -> None:
    folder, ranks = answers
    model = model_of(folder, 1)
    prompt, tokens = prompts(0)[0], ranks[0][1][0]
    assert model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
