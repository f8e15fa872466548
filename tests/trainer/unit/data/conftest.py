"""Tokenizers made from nothing, and data sets that leave no trace outside the test's folder."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_api.spec.data import DataSource
from rlhf_api.spec.job_spec import JobSpec

Write = Callable[[Sequence[Mapping[str, object]]], DataSource]

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.name is defined %}{{ message.name }}: {% endif %}{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def spec_of(
    prompt_tokens: int,
    response_tokens: int,
    *,
    least_prompt_tokens: int = 1,
    least_response_tokens: int = 1,
    overlong: str = "Drop",
    on_bad_row: str = "Drop",
    chat_template: str = "Auto",
    seed: int = 0,
    total_epochs: int | None = None,
) -> JobSpec:
    """A job whose prompts and responses may be so long."""
    return JobSpec.model_validate(
        {
            "algorithm": {"name": "SFT"},
            "models": {"actor": {"uri": "hf://a/model"}},
            "data": {
                "train": {"uri": "hf://a/b"},
                "minPromptTokens": least_prompt_tokens,
                "minResponseTokens": least_response_tokens,
                "maxPromptTokens": prompt_tokens,
                "maxResponseTokens": response_tokens,
                "overlong": overlong,
                "onBadRow": on_bad_row,
                "chatTemplate": chat_template,
            },
            "training": {"batchSize": 4, "seed": seed, "totalEpochs": total_epochs},
        }
    )


def byte_tokenizer(*, opens: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte, so that lengths are lengths of texts; opens: it puts a token before every text."""
    special = ["<pad>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<s>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    start = bpe.token_to_id("<s>")
    if opens:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>")


@pytest.fixture
def plain() -> PreTrainedTokenizerFast:
    """A tokenizer without a chat template."""
    return byte_tokenizer()


@pytest.fixture
def opening() -> PreTrainedTokenizerFast:
    """A tokenizer without a chat template that begins every text with <s>."""
    return byte_tokenizer(opens=True)


@pytest.fixture
def chat() -> PreTrainedTokenizerFast:
    """A tokenizer whose template ends a turn with the end-of-text token and a line break."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder that `datasets` may write to."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder))
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Rows -> the source of a file that holds them."""

    def source_of(rows: Sequence[Mapping[str, object]]) -> DataSource:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DataSource(uri=f"file://{file}")

    return source_of
