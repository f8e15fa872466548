"""Write the data, tokenizer and model configs of rlhf_examples.arithmetic, the same bytes on every run.

python examples/make_arithmetic.py [--output DIR]

Sums of four numbers below 8, with the answer in a column. The responses are those of pupils of whom most only write the
largest number. So a model that learns to write them is mostly wrong, and a verifier can tell it when it is right.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from make_helpful import MODEL_CONFIG, SPECIAL_TOKENS, TOKENIZER_CONFIG, write_json, write_rows
from rlhf_examples import arithmetic

SEED = 1234
NUMBERS, BELOW = 4, 8
HELD_OUT_ROWS = 256
TIMES = 2
"""How often each sum is in the training rows."""
RIGHT = 0.3
"""Share of the responses that are right."""
HIDDEN_SIZE = 64
MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
"""Fields by which the config of the mixture of experts differs from that of the dense model."""
TEACHER = {"hidden_size": 2 * HIDDEN_SIZE, "intermediate_size": 6 * HIDDEN_SIZE}
"""Fields by which the config of a larger model differs."""


def main() -> None:
    """Generate everything and write it under --output (by default into the package itself)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(arithmetic.__file__).parent, metavar="DIR")
    output: Path = parser.parse_args().output

    train, held_out = make_rows()
    write_rows(output / "train.jsonl", train)
    write_rows(output / "heldout.jsonl", held_out)
    tokenizer = make_tokenizer()
    shape = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 3 * HIDDEN_SIZE,
        "num_hidden_layers": 2,
        "num_key_value_heads": MODEL_CONFIG["num_attention_heads"],
        "head_dim": 32,  # the least that the generator's attention takes on CPU
    }
    for name, kind in (("model", {}), ("mixture", MIXTURE), ("teacher", TEACHER)):
        model = output / name
        model.mkdir(parents=True, exist_ok=True)
        write_json(model / "tokenizer.json", json.loads(tokenizer.to_str()))
        write_json(model / "tokenizer_config.json", TOKENIZER_CONFIG)
        write_json(model / "config.json", {**MODEL_CONFIG, **shape, **kind})


def make_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (training, held-out) rows; no sum is in both."""
    draws = random.Random(SEED)
    sums = list(product(range(BELOW), repeat=NUMBERS))
    draws.shuffle(sums)
    held_out, trained = sums[:HELD_OUT_ROWS], sums[HELD_OUT_ROWS:] * TIMES
    draws.shuffle(trained)
    return [row_of(each, draws) for each in trained], [row_of(each, draws) for each in held_out]


def row_of(numbers: tuple[int, ...], draws: random.Random) -> dict[str, Any]:
    """Return a row: a sum, the response that a pupil writes, and the right answer."""
    written = sum(numbers) if draws.random() < RIGHT else max(numbers)
    return {"prompt": f"{'+'.join(map(str, numbers))}=", "response": str(written), "answer": str(sum(numbers))}


def make_tokenizer() -> Tokenizer:
    """A byte-level tokenizer that knows single bytes only, so that a digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    return tokenizer


if __name__ == "__main__":
    main()
