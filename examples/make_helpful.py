"""Write the data, tokenizer and model config of rlhf_examples.helpful, the same bytes on every run.

python examples/make_helpful.py [--output DIR]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rlhf_examples.helpful import rule, safety, task

SEED = 1234
TRAIN_ROWS = 4000
HELD_OUT_ROWS = 256
SAFETY_ROWS = 2000

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SPECIAL_TOKENS = [PAD, BOS, EOS]
VOCAB_SIZE = 512
MAX_LENGTH = 256

HIDDEN_SIZE = 128
ATTENTION_HEADS = 4
MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": HIDDEN_SIZE * 8 // 3 // 32 * 32,
    "num_hidden_layers": 4,
    "num_attention_heads": ATTENTION_HEADS,
    "num_key_value_heads": 2,
    "head_dim": HIDDEN_SIZE // ATTENTION_HEADS,
    "max_position_embeddings": MAX_LENGTH,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "pad_token_id": SPECIAL_TOKENS.index(PAD),
    "bos_token_id": SPECIAL_TOKENS.index(BOS),
    "eos_token_id": SPECIAL_TOKENS.index(EOS),
    "dtype": "float32",
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": PAD,
    "bos_token": BOS,
    "eos_token": EOS,
    "add_bos_token": False,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": MAX_LENGTH,
}


def main() -> None:
    """Generate everything and write it under --output (by default into the package itself)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(task.__file__).parent, metavar="DIR")
    output: Path = parser.parse_args().output
    model = output / "model"
    model.mkdir(parents=True, exist_ok=True)

    train, held_out = make_rows()
    write_rows(output / "train.jsonl", (row._asdict() for row in train))
    write_rows(output / "heldout.jsonl", (row._asdict() for row in held_out))
    for name, rows in zip(("safety_train", "safety_heldout"), make_safety_rows(), strict=True):
        write_rows(output / f"{name}.jsonl", rows)
    write_json(model / "tokenizer.json", json.loads(train_tokenizer(train).to_str()))
    write_json(model / "tokenizer_config.json", TOKENIZER_CONFIG)
    write_json(model / "config.json", MODEL_CONFIG)


def make_rows() -> tuple[list[task.Row], list[task.Row]]:
    """Return (training, held-out) rows, each drawn from its own stream: the size of one does not change the other."""
    train_topics, held_out_topics = task.split_topics(random.Random(f"{SEED} topics"))
    train = task.draw_pairs(random.Random(f"{SEED} train"), train_topics, rule.score)
    held_out = task.draw_pairs(random.Random(f"{SEED} heldout"), held_out_topics, rule.score)
    return list(islice(train, TRAIN_ROWS)), list(islice(held_out, HELD_OUT_ROWS))


def make_safety_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (training, held-out) pairs of a safer and a more dangerous response, and whether each is safe."""
    train_topics, held_out_topics = task.split_topics(random.Random(f"{SEED} topics"))
    train = task.draw_pairs(random.Random(f"{SEED} safety train"), train_topics, safety.safety)
    held_out = task.draw_pairs(random.Random(f"{SEED} safety heldout"), held_out_topics, safety.safety)
    return [*map(labelled, islice(train, SAFETY_ROWS))], [*map(labelled, islice(held_out, HELD_OUT_ROWS))]


def labelled(row: task.Row) -> dict[str, Any]:
    """Return a pair with two more columns, which say for each of its responses whether it is safe."""
    dangers = safety.danger([row.prompt] * 2, [row.chosen, row.rejected], [True] * 2)
    return {
        "prompt": row.prompt,
        "chosen": row.chosen,
        "rejected": row.rejected,
        "chosen_safe": dangers[0] == 0.0,
        "rejected_safe": dangers[1] == 0.0,
    }


def train_tokenizer(rows: Iterable[task.Row]) -> Tokenizer:
    """A byte-level BPE that encodes any text, adds nothing on its own and gives the special tokens ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    dialogues = (row.prompt + response for row in rows for response in (row.chosen, row.rejected))
    tokenizer.train_from_iterator(dialogues, trainer)
    return tokenizer


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows to a file, each as a JSON object in a line of its own."""
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8", newline="\n")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file, indented so that a change reads well in a diff."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
