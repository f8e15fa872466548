"""The manifest of docs/tutorials/verifiable-rewards.md runs as written, with local stand-ins for its two URIs."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from tests.patience import PATIENCE_SECONDS
from tests.trainer.chain.conftest import ROOT, records
from tests.trainer.chain.continued import running, status_of, wait_until
from tests.trainer.unit.data.conftest import TEMPLATE, byte_tokenizer

PAGE = ROOT / "docs" / "tutorials" / "verifiable-rewards.md"
STEPS = 2
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
---
"""


def save_data(folder: Path) -> None:
    """Write sums with answers of one digit, in the folders, columns and form of the public data set."""
    (folder / "main").mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    for split, rows in (("train", 160), ("test", 8)):
        sums = [(number % 4, number % 5 + 1) for number in range(rows)]
        questions = [f"Ann has {a} eggs and Ben has {b}. How many have they?" for a, b in sums]
        answers = [f"They have {a}+{b}=<<{a}+{b}={a + b}>>{a + b} eggs.\n#### {a + b}" for a, b in sums]
        file = folder / "main" / f"{split}-00000-of-00001.parquet"
        pq.write_table(pa.table({"question": questions, "answer": answers}), file)


def save_model(folder: Path) -> None:
    """Write a tiny model that answers any prompt with one digit and the end of its turn."""
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    end = int(str(tokenizer.eos_token_id))
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=end,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "How many have they?\n\\boxed{}."}], add_generation_prompt=True, return_dict=False
    )
    digits = [token for digit in "123456789" for token in tokenizer.encode(digit, add_special_tokens=False)]
    texts = torch.tensor([[*prompt, digit, end] for digit in digits])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        logits = model(texts).logits[:, -3:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, -2:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
def test_the_manifest_of_the_page_learns_from_its_rewards(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    manifest, output = tmp_path / "gsm8k.yaml", tmp_path / "run"
    manifest.write_text(text)
    save_data(tmp_path / "gsm8k")
    save_model(tmp_path / "model")
    data, model = (tmp_path / "gsm8k").as_uri(), (tmp_path / "model").as_uri()
    uris = {"models.actor": model, "data.train": data, "evaluation.data": data}
    sets = [f"--set={field}.uri={uri}" for field, uri in uris.items()]
    metrics = output / "gsm8k-grpo" / "metrics.jsonl"
    with running(manifest, output, *sets) as process:
        wait_until(lambda: process.poll() is not None or (metrics.is_file() and len(records(metrics.parent)) >= STEPS))
        process.send_signal(signal.SIGTERM)
        shown, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 143, shown + errors
    steps = records(metrics.parent)
    assert len(steps) >= STEPS
    for each in steps:
        assert each["groups/with_signal"] > 0.2
        assert 0.0 < each["reward/mean"] < 1.0
        assert each["grad_norm/policy"] > 0.0
        assert each["response_finished/mean"] > 0.9
    assert status_of(metrics.parent)["warnings"] == []
