"""The tokens that end a response are those of the tokenizer, of its template and of the model folder, everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_api.spec.rollout import Rollout
from rlhf_trainer.chat import end_tokens
from rlhf_trainer.data.tokens import Column, Encoder
from rlhf_trainer.data.turns import TurnEncoder
from rlhf_trainer.generation.vllm_arguments import sampling_arguments
from rlhf_trainer.training.loading import load_end_tokens
from rlhf_trainer.training.saving import save_config_and_tokenizer
from rlhf_trainer.types import Batch
from rlhf_trainer.workers.samples import sample_of
from tests.each import each_case
from tests.foreign.turns.encoding import ends_of, text_of
from tests.foreign.turns.families import FAMILIES, tokenizer_of


@pytest.fixture
def gemma() -> PreTrainedTokenizerFast:
    return tokenizer_of(FAMILIES["gemma"])


@each_case("name", FAMILIES)
def test_ends_are_the_templates_and_the_files(name: str) -> None:
    ends = ends_of(FAMILIES[name], tokenizer_of(FAMILIES[name]))
    assert list(ends.texts) == list(FAMILIES[name].ends)


@each_case("name", FAMILIES)
def test_a_target_ends_with_one_of_them(name: str) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(FAMILIES[name])
    encoder = Encoder(
        Column(field="x", values=["3+4="]), tokenizer, chat_template="Auto", ends=ends_of(family, tokenizer)
    )
    (reply,) = encoder.responses(Column(field="y", values=["7"]), encoder.prompts())
    assert text_of(tokenizer, reply) == family.learned[-1].replace("2", "7")


def test_vllm_stops_at_each_and_at_no_other(gemma: PreTrainedTokenizerFast) -> None:
    ends = end_tokens(gemma).ids
    found = sampling_arguments(Rollout(), ends=ends, seed=1, max_tokens=8, greedy=False)
    assert (found["stop_token_ids"], found["ignore_eos"]) == (ends, True)
    assert len(ends) == 2


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_the_files_of_a_model_list_ends(file: str, gemma: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    pad = gemma.convert_tokens_to_ids("<pad>")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps({"eos_token_id": [gemma.eos_token_id, pad, 9999]}))
    ends = load_end_tokens(str(tmp_path), gemma, revision=None)
    assert list(ends.texts) == ["<end_of_turn>", "<|endoftext|>", "<pad>"]
    assert "the tokenizer lacks [9999] of the model's files" in ends.sentence()


def test_an_environment_gets_the_answer_without_its_end(gemma: PreTrainedTokenizerFast) -> None:
    encoder = TurnEncoder(gemma, chat_template="Auto")
    ids = gemma("7", add_special_tokens=False)["input_ids"]
    for end in ("<end_of_turn>", "<|endoftext|>"):
        assert encoder.answer([*ids, gemma.convert_tokens_to_ids(end)]) == "7"
    observed = text_of(gemma, encoder.observation("More."))
    assert observed == "\n<start_of_turn>user\nMore.<end_of_turn>\n<start_of_turn>model\n"


def test_an_end_that_is_not_special_is_no_text(gemma: PreTrainedTokenizerFast) -> None:
    gemma.add_tokens(["<stop>"])
    ids = [*gemma("37", add_special_tokens=False)["input_ids"], gemma.convert_tokens_to_ids("<stop>")]
    mask = torch.tensor([[0.0, 1.0, 1.0]])
    fields = {"tokens": torch.tensor([ids]), "attention_mask": torch.ones(1, 3), "response_mask": mask}
    texts = []
    for finished in (1.0, 0.0):
        ended = {"finished": torch.tensor([finished]), "valid": torch.ones(1)}
        texts.append(sample_of(Batch(step=1, start=0, size=1, fields={**fields, **ended}), 0, gemma).response)
    assert texts == ["7", "7<stop>"], "what is cut at the limit stays as it is"


@pytest.mark.parametrize(("given", "saved"), [(None, "both"), ("eos", "both"), ("both", "both"), ("more", "more")])
def test_an_exported_model_stops_where_the_job_did(
    given: str | None, saved: str, gemma: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    eos, turn = gemma.eos_token_id, gemma.convert_tokens_to_ids("<end_of_turn>")
    pad = gemma.convert_tokens_to_ids("<pad>")
    lists: dict[str, Any] = {"eos": eos, "both": [turn, eos], "more": [turn, eos, pad]}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(gemma), **sizes))
    model.generation_config = GenerationConfig(eos_token_id=lists[given] if given else None)
    save_config_and_tokenizer(model, gemma, tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == lists[saved]


def test_the_start_names_the_ends(gemma: PreTrainedTokenizerFast) -> None:
    ends = end_tokens(gemma)
    turn, eos = ends.ids
    assert ends.sentence() == f"a response ends with <end_of_turn> ({turn}) or <|endoftext|> ({eos})"
