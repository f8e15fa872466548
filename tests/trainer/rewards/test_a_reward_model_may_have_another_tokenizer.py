"""A reward model reads a response in its own tokens and template; of several outputs one is the score.

Held against the forward pass of transformers on the text that the model's own tokenizer writes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_trainer.errors import ConfigError, DataError
from rlhf_trainer.protocols import blocks
from rlhf_trainer.run.preconditions import other_vocabularies
from rlhf_trainer.training.loading import load_scorer
from rlhf_trainer.types import Batch
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.retokenized import with_prompts
from rlhf_trainer.workers.reward import RewardWorker
from rlhf_trainer.workers.samples import as_bytes
from rlhf_trainer.workers.scoring import ScoringWorker
from tests.mapper.planned_jobs import job_of
from tests.trainer.chain.mistakes import FUNCTIONS, PPO
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import save_tiny

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = [{"role": "user", "content": "What is tea?"}, {"role": "assistant", "content": "A drink."}]
PROMPTS: dict[str, list[Any]] = {
    "messages": ["How do I clean it?", [*CHAT, {"role": "user", "content": "And mate?"}], "Hello"],
    "texts": ["How do I clean it?", "And mate?", "Hello"],
}
RESPONSES = [" First, wipe the lamp.", " Sure, let us start.", " I do not know."]
LABELS, LABEL = 3, 2


def save_other(folder: Path, *, template: str | None = TEMPLATE, labels: int = LABELS, positions: int = 512) -> str:
    """A classifier of several labels with a byte-level tokenizer of its own."""
    special = ["<|end|>", "<s>", "<pad>", "<|user|>", "<|assistant|>"]
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator([], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="<|end|>", pad_token="<pad>", chat_template=template
    )
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 2}
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": positions}
    config = LlamaConfig(initializer_range=0.1, **sizes, **ids)
    config.num_labels = labels
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def job_with(folder: Path, reward: str) -> Job:
    path = folder / "job.yaml"
    path.write_text(PPO)
    return load(path, [f"models.reward={reward}"])[0]


def here(actor: str, prompts: str) -> Batch:
    """This rank's rows, in the actor's tokens; the last row is padding."""
    tokenizer = AutoTokenizer.from_pretrained(actor)
    texts = [(f"{row}", response) for row, response in enumerate(RESPONSES)]
    ids = [(tokenizer.encode(one), [*tokenizer.encode(two), tokenizer.eos_token_id]) for one, two in texts]
    size, width = len(ids) + 1, max(len(one) + len(two) for one, two in ids)
    fields = {name: torch.zeros(size, width) for name in ("tokens", "attention_mask", "response_mask")}
    fields["tokens"] = fields["tokens"].long()
    for row, (one, two) in enumerate(ids):
        end = len(one) + len(two)
        fields["tokens"][row, :end] = torch.tensor([*one, *two])
        fields["attention_mask"][row, :end] = 1.0
        fields["response_mask"][row, len(one) : end] = 1.0
    real = torch.tensor([1.0] * len(ids) + [0.0])
    columns = as_bytes([*({"prompt": prompt} for prompt in PROMPTS[prompts]), {"prompt": "x"}])
    fields |= {"finished": real, "valid": real, "sampled": torch.ones(size), "columns": columns}
    rows = blocks(size, int(os.environ["WORLD_SIZE"]))[int(os.environ["RANK"])]
    given = {name: field[rows.start : rows.stop] for name, field in fields.items()}
    return Batch(step=1, start=rows.start, size=len(rows), fields=given)


def scores(job: Job, actor: str, reward: str, worker_class: type, prompts: str = "messages") -> list[float]:
    """The worker's scores of this rank's rows."""
    models = job.models()
    setting = WorkerSetting(
        job=with_prompts(job),
        role="reward",
        model=models["reward"],
        folder=reward,
        total_steps=1,
        actor=(models["actor"], actor),
    )
    return list(worker_class(setting).compute_reward(here(actor, prompts))["scores"].tolist())


def expected(reward: str, prompts: str = "messages") -> list[float]:
    """What transformers says of each whole text."""
    tokenizer = AutoTokenizer.from_pretrained(reward)
    model = AutoModelForSequenceClassification.from_pretrained(reward)
    found = []
    for prompt, response in zip(PROMPTS[prompts], RESPONSES, strict=True):
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if tokenizer.chat_template:
            chat = [*chat, {"role": "assistant", "content": response}]
            ids = tokenizer.apply_chat_template(chat, return_dict=True, return_tensors="pt")["input_ids"]
        else:
            ids = tokenizer(prompt + response, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            found.append(float(model(input_ids=ids).logits[0, LABEL]))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_score_is_transformers_own_in_its_template(tmp_path: Path, ranks: int) -> None:
    actor, reward = save_tiny(tmp_path / "actor", seed=1), save_other(tmp_path / "reward")
    job = job_with(tmp_path, f"{{uri: 'file://reward', label: {LABEL}}}")
    results = run_kept_ranks(ranks, scores, job, actor, reward, RewardWorker)
    found = [value for part in results for value in part]
    assert found[: len(RESPONSES)] == pytest.approx(expected(reward), abs=1e-5)
    assert len({round(value, 3) for value in found[:3]}) == 3


def test_without_a_template_prompt_and_response_are_a_text(tmp_path: Path) -> None:
    actor, reward = save_tiny(tmp_path / "actor", seed=1), save_other(tmp_path / "reward", template=None)
    job = job_with(tmp_path, f"{{uri: 'file://reward', label: {LABEL}}}")
    (found,) = run_kept_ranks(1, scores, job, actor, reward, RewardWorker, "texts")
    assert found[: len(RESPONSES)] == pytest.approx(expected(reward, "texts"), abs=1e-5)


def test_messages_need_a_template(tmp_path: Path) -> None:
    actor, reward = save_tiny(tmp_path / "actor", seed=1), save_other(tmp_path / "reward", template=None)
    job = job_with(tmp_path, f"{{uri: 'file://reward', label: {LABEL}}}")
    (told,) = run_kept_ranks(1, sentence, job, actor, reward)
    expected = "a prompt is a list of messages, but the tokenizer has no chat template"
    assert told == f"ppo: spec.models.reward: {expected}"


def test_it_may_be_a_part_of_a_sum_beside_functions(tmp_path: Path) -> None:
    actor, reward = save_tiny(tmp_path / "actor", seed=1), save_other(tmp_path / "reward")
    terms = f"{{name: model, reward: {{uri: 'file://reward', label: {LABEL}}}}}"
    terms += f", {{name: length, reward: {{entrypoint: '{FUNCTIONS}:lengths'}}}}"
    (found,) = run_kept_ranks(1, scores, job_with(tmp_path, f"{{sum: [{terms}]}}"), actor, reward, ScoringWorker)
    lengths = [len("0") + len(response) + True for response in RESPONSES]
    total = [one + two for one, two in zip(expected(reward), lengths, strict=True)]
    assert found == pytest.approx([*total, 0.0], abs=1e-4)


def test_a_text_that_is_longer_than_the_model_reads_is_named(tmp_path: Path) -> None:
    actor, reward = save_tiny(tmp_path / "actor", seed=1), save_other(tmp_path / "reward", positions=16)
    job = job_with(tmp_path, f"{{uri: 'file://reward', label: {LABEL}}}")
    (told,) = run_kept_ranks(1, sentence, job, actor, reward)
    assert told.startswith("ppo: spec.models.reward: reads 16 tokens, and ")
    assert "are needed for row 1 of step 1" in told


def sentence(job: Job, actor: str, reward: str) -> str:
    with pytest.raises(DataError) as raised:
        scores(job, actor, reward, RewardWorker)
    return str(raised.value)


def test_only_models_that_score_may_have_another_vocabulary(tmp_path: Path) -> None:
    actor, reward = save_tiny(tmp_path / "actor", seed=1), save_other(tmp_path / "reward")
    job = job_with(tmp_path, f"{{uri: 'file://reward', label: {LABEL}}}")
    folders: Any = dict.fromkeys(job.models(), actor)
    assert other_vocabularies(job, job.models(), folders) == set()
    assert other_vocabularies(job, job.models(), {**folders, "reward": reward}) == {"reward"}
    with pytest.raises(ConfigError, match=r"^ppo: spec\.models\.critic: its tokenizer is not the actor's \(2"):
        other_vocabularies(job, job.models(), {**folders, "critic": reward})


def test_a_teacher_has_the_vocabulary_of_its_student(tmp_path: Path) -> None:
    actor, teacher = save_tiny(tmp_path / "actor", seed=1), save_other(tmp_path / "teacher")
    job = job_of("Distillation", rollout={"samplesPerPrompt": 2})
    folders: Any = dict.fromkeys(job.models(), actor)
    assert other_vocabularies(job, job.models(), folders) == set()
    with pytest.raises(ConfigError, match=r"^job: spec\.models\.teacher: its tokenizer is not the actor's \(2"):
        other_vocabularies(job, job.models(), {**folders, "teacher": teacher})


@pytest.mark.parametrize(
    ("label", "may_add_head", "told"),
    [
        (None, False, "here: {folder} has 3 labels; say by label which of them is the score, from 0 to 2"),
        (3, False, "here.label: is 3, but {folder} has 3 labels, from 0 to 2"),
        (1, True, "here: {folder} has 3 labels; one that is trained has 1"),
    ],
)
def test_a_label_that_is_no_score_is_told(tmp_path: Path, label: int | None, may_add_head: bool, told: str) -> None:
    folder = save_other(tmp_path / "reward")
    with pytest.raises(ConfigError) as raised:
        load_scorer(
            folder,
            seed=0,
            trust_remote_code=False,
            revision=None,
            path="here",
            may_add_head=may_add_head,
            label=label,
        )
    assert str(raised.value) == told.format(folder=folder)
