"""SFT on conversations with templates of many kinds: each answer is learned, or is counted and named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from tokenizers import pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_api.spec.job_spec import JobSpec
from rlhf_trainer.data.loaders import CompletionLoader
from rlhf_trainer.data.tokens import UNALIGNED, UNLEARNED
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.data import DataWorker
from tests.foreign.turns.encoding import encoder_of, fault, learned
from tests.foreign.turns.families import FAMILIES, TALK, TOOL_TALK, tokenizer_of
from tests.trainer import jobs

THOUGHT = "<think>\nthree and four\n</think>\n\n"
WITH_CALLS = [name for name, family in FAMILIES.items() if family.call]


@pytest.mark.parametrize("name", FAMILIES)
def test_both_answers_of_two_turns_are_learned_or_told(name: str) -> None:
    """GPT-OSS templates end earlier answers with a token that ends no response."""
    family, tokenizer = FAMILIES[name], tokenizer_of(FAMILIES[name])
    encoder = encoder_of(family, tokenizer, TALK)
    assert learned(encoder, tokenizer) == list(family.learned)
    assert encoder.notes == ([(0, UNLEARNED)] if name == "harmony" else [])


@pytest.mark.parametrize("name", WITH_CALLS)
def test_the_call_of_a_tool_is_learned(name: str) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(FAMILIES[name])
    encoder = encoder_of(family, tokenizer, TOOL_TALK)
    call, answer = learned(encoder, tokenizer)
    assert call == family.call
    assert "It is 7." in answer
    assert encoder.notes == []


@pytest.mark.parametrize("name", ["phi", "gemma", "glm", "harmony", "cohere"])
def test_a_call_that_is_not_written_is_a_fault(name: str) -> None:
    encoder = encoder_of(FAMILIES[name], tokenizer_of(FAMILIES[name]), TOOL_TALK)
    told = "has a message of role 'assistant' that the tokenizer's chat template leaves out"
    assert fault(encoder) == told


@pytest.mark.parametrize("name", ["thinking", "r1"])
def test_an_answer_that_loses_its_thoughts_is_counted(name: str) -> None:
    tokenizer = tokenizer_of(FAMILIES[name])
    talk = [dict(each) for each in TALK]
    talk[1]["content"] = THOUGHT + "7"
    encoder = encoder_of(FAMILIES[name], tokenizer, talk)
    assert learned(encoder, tokenizer) == [FAMILIES[name].learned[1]]
    assert encoder.notes == [(0, UNLEARNED)]


@pytest.mark.parametrize("name", ["thinking", "r1", "chatml"])
def test_the_thoughts_of_the_last_answer_are_learned(name: str) -> None:
    tokenizer = tokenizer_of(FAMILIES[name])
    talk = [*TALK[:3], {"role": "assistant", "content": THOUGHT + "2"}]
    first, last = learned(encoder_of(FAMILIES[name], tokenizer, talk), tokenizer)
    assert first == FAMILIES[name].learned[0]
    text = f"{THOUGHT}2{FAMILIES[name].ends[0]}"
    assert last == (text.removeprefix("<think>\n") if name == "r1" else text), "the prompt of R1 opens the thoughts"


@pytest.mark.parametrize("tag", ["thinking", "seed:think"])
def test_a_thought_that_the_prompt_opens_is_learned_once(tag: str) -> None:
    family = FAMILIES["r1"]
    family = replace(family, template=family.template.replace("think>", f"{tag}>"))
    thought = THOUGHT.replace("think>", f"{tag}>")
    tokenizer = tokenizer_of(family)
    talk = [*TALK[:3], {"role": "assistant", "content": thought + "2"}]
    assert learned(encoder_of(family, tokenizer, talk), tokenizer)[-1] == f"{thought[len(tag) + 3 :]}2{family.ends[0]}"


def test_thoughts_of_their_own_key_are_not_lost_in_silence() -> None:
    family, tokenizer = FAMILIES["chatml"], tokenizer_of(FAMILIES["chatml"])
    talk = [*TALK[:3], {"role": "assistant", "content": "2", "reasoning_content": "one and one"}]
    expected = "has a last answer that the tokenizer's chat template leaves out in part"
    assert fault(encoder_of(family, tokenizer, talk)) == expected


class Slow(PreTrainedTokenizerFast):  # type: ignore[misc]  # transformers has no types
    """A tokenizer that gives no offsets, as those that are written in Python."""

    is_fast = False


def slow(tokenizer: PreTrainedTokenizerFast) -> Slow:
    found = Slow(tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token, bos_token="<s>")
    found.chat_template = tokenizer.chat_template
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_no_offsets_are_needed_to_learn_all_answers(name: str) -> None:
    tokenizer = slow(tokenizer_of(FAMILIES[name]))
    encoder = encoder_of(FAMILIES[name], tokenizer, TALK)
    assert learned(encoder, tokenizer) == list(FAMILIES[name].learned)


def test_an_answer_that_is_joined_with_its_question_is_counted() -> None:
    """One token has the end of the question and the beginning of the answer, so no offset tells them apart."""
    family = replace(FAMILIES["chatml"], template=PLAIN, special=["<end>"], listed=["<end>"])
    joined = tokenizer_of(family).backend_tokenizer
    joined.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    joined.train_from_iterator(["A:7"] * 9, trainer)
    tokenizer = Slow(tokenizer_object=joined, eos_token="<end>", chat_template=PLAIN)
    encoder = encoder_of(family, tokenizer, TALK)
    assert learned(encoder, tokenizer) == ["2<end>"]
    assert encoder.notes == [(0, UNALIGNED)]


PLAIN = (
    "{% for m in messages %}{% if m.role == 'user' %}Q:{{ m.content }}A:{% else %}{{ m.content }}<end>{% endif %}"
    "{% endfor %}"
)
"""Template with no token between a question and its answer."""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only folder that `datasets` may write to."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def loader_of(folder: Path, tokenizer: PreTrainedTokenizerFast, *talks: object) -> CompletionLoader:
    file = folder / "talks.jsonl"
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    spec = JobSpec.model_validate(
        {
            "algorithm": {"name": "SFT"},
            "models": {"actor": {"uri": "hf://a/model"}},
            "data": {"train": {"uri": f"file://{file}", "messagesKey": "messages"}},
            "training": {"batchSize": 1},
        }
    )
    return CompletionLoader(spec.data.train, tokenizer, path="spec.data.train", spec=spec)


def test_the_start_tells_how_many_answers_are_not_learned(tmp_path: Path) -> None:
    talk = [dict(each) for each in TALK]
    talk[1]["content"] = THOUGHT + "7"
    loader = loader_of(tmp_path, tokenizer_of(FAMILIES["thinking"]), TALK, talk, talk)
    place = f"{tmp_path / 'talks.jsonl'}, line 2"
    assert loader.facts() == [f"spec.data.train: {UNLEARNED}: 2, such as in {place}"]


def test_nothing_is_told_if_all_answers_are_learned(tmp_path: Path) -> None:
    assert loader_of(tmp_path, tokenizer_of(FAMILIES["chatml"]), TALK).facts() == []


def test_answers_of_the_pretraining_texts_are_counted_too(tmp_path: Path) -> None:
    tokenizer_of(FAMILIES["thinking"]).save_pretrained(tmp_path / "model")
    talk = [dict(each) for each in TALK]
    talk[1]["content"] = THOUGHT + "7"
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "3+4="}) + "\n")
    model = {"uri": "hf://x"}
    spec = {
        "algorithm": {"name": "PPO", "pretrainCoefficient": 1.0},
        "models": {"actor": model, "critic": model, "reward": model},
        "data": {
            "train": {"uri": "file://prompts.jsonl"},
            "pretrain": {"uri": "file://talks.jsonl", "messagesKey": "messages"},
        },
        "training": {"totalSteps": 1, "promptBatchSize": 1},
    }
    job = jobs.job(tmp_path, "ppo", spec)
    folder, actor = str(tmp_path / "model"), job.models()["actor"]
    setting = WorkerSetting(job=job, role="actor", model=actor, folder=folder, total_steps=1)
    assert DataWorker(setting, slots=1).describe().counts == {"data/unlearned_messages": 1.0}
