"""The helpful task's data: the held-out split, the columns, the margins and the lengths that the manifests rely on."""

import json
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import rlhf_examples.helpful
from rlhf_examples.helpful import rule, task

FOLDER = Path(rlhf_examples.helpful.__file__).parent
MODEL = FOLDER / "model"
SPLITS = {"train": 4000, "heldout": 256}
MAX_PROMPT_TOKENS = 15
MAX_RESPONSE_TOKENS = 34  # with the end of text

each_split = pytest.mark.parametrize("split", SPLITS)


@cache
def read_split(split: str) -> list[dict[str, str]]:
    with (FOLDER / f"{split}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def find_topic(prompt: str) -> task.Topic:
    words = prompt.replace("?", " ").replace(".", " ").split()
    (verb,) = (word for word in words if word in task.VERBS)
    (noun,) = (word for word in words if word in task.NOUNS)
    return task.Topic(verb, noun)


def test_heldout_prompts_are_never_trained_on() -> None:
    trained_on = {find_topic(row["prompt"]) for row in read_split("train")}
    held_out = {find_topic(row["prompt"]) for row in read_split("heldout")}
    assert trained_on.isdisjoint(held_out)
    assert len(trained_on) == len(task.VERBS) * len(task.NOUNS) - task.HELD_OUT_TOPICS
    assert len(held_out) <= task.HELD_OUT_TOPICS


def test_every_word_of_a_heldout_prompt_is_trained_on() -> None:
    trained_on = {word for row in read_split("train") for word in row["prompt"].split()}
    assert {word for row in read_split("heldout") for word in row["prompt"].split()} <= trained_on


@each_split
def test_the_columns_are_those_of_full_hh_rlhf(split: str) -> None:
    rows = read_split(split)
    assert len(rows) == SPLITS[split]
    assert {tuple(row) for row in rows} == {("prompt", "response", "chosen", "rejected")}
    assert all(row["response"] == row["chosen"] for row in rows)
    assert all(row["prompt"].startswith("\n\nHuman: ") and row["prompt"].endswith("\n\nAssistant:") for row in rows)
    assert all(row["chosen"].startswith(" ") and row["rejected"].startswith(" ") for row in rows)


@each_split
def test_the_rule_prefers_chosen_by_a_clear_margin(split: str) -> None:
    rows = read_split(split)
    prompts, finished = [row["prompt"] for row in rows], [True] * len(rows)
    chosen = rule.score(prompts, [row["chosen"] for row in rows], finished)
    rejected = rule.score(prompts, [row["rejected"] for row in rows], finished)
    assert min(better - worse for better, worse in zip(chosen, rejected, strict=True)) == task.MIN_MARGIN
    at_best = sum(score == rule.BEST for score in chosen) / len(chosen)
    assert 0.05 < at_best < 0.15, "supervised fine-tuning on chosen must leave PPO headroom"


@each_split
def test_prompts_and_responses_fit_the_token_limits(split: str) -> None:
    tokenizer, rows = AutoTokenizer.from_pretrained(MODEL), read_split(split)
    responses = [row[column] for row in rows for column in ("chosen", "rejected")]
    assert max(map(len, tokenizer([row["prompt"] for row in rows]).input_ids)) <= MAX_PROMPT_TOKENS
    assert max(len(ids) + 1 for ids in tokenizer(responses).input_ids) <= MAX_RESPONSE_TOKENS


@each_split
def test_prompt_and_response_tokenise_apart_as_together(split: str) -> None:
    tokenizer, rows = AutoTokenizer.from_pretrained(MODEL), read_split(split)
    prompts = tokenizer([row["prompt"] for row in rows]).input_ids
    chosen = tokenizer([row["chosen"] for row in rows]).input_ids
    together = tokenizer([row["prompt"] + row["chosen"] for row in rows]).input_ids
    assert [prompt + response for prompt, response in zip(prompts, chosen, strict=True)] == together


@pytest.mark.parametrize("text", ["", " Good question!", "\n\nHuman: é 漢字 🙂\x00 \t a , b . 's n't\n\nAssistant:"])
def test_the_tokenizer_gives_any_text_back_and_adds_nothing(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.all_special_ids)


def test_the_model_folder_holds_a_small_llama() -> None:
    tokenizer, config = AutoTokenizer.from_pretrained(MODEL), AutoConfig.from_pretrained(MODEL)
    special = (config.pad_token_id, config.bos_token_id, config.eos_token_id)
    assert special == (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert config.vocab_size == len(tokenizer) == 512
    model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == 754_816
    assert not list(MODEL.glob("*.safetensors"))
