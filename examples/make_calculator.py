"""Write the data, tokenizer and model config of rlhf_examples.calculator, the same bytes on every run.

python examples/make_calculator.py [--output DIR]

What remains of the product of two numbers of four digits, divided by 3. A small model cannot find it in its head and is
right in a third of the cases. Three of ten conversations use a calculator; in the others a pupil guesses.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from make_helpful import MODEL_CONFIG, SPECIAL_TOKENS, TOKENIZER_CONFIG, write_json, write_rows
from rlhf_examples import calculator
from rlhf_examples.calculator.tool import calculate

SEED = 1234
SMALLEST, LARGEST, DIVISOR = 1000, 9999, 3
TRAIN_ROWS, HELD_OUT_ROWS = 2000, 128
WITH_TOOL = 0.3
"""Share of the training conversations that use the calculator."""
HIDDEN_SIZE = 64
CALL = '{{"name": "calculate", "arguments": {{"expression": "{}"}}}}'
MARKS = ["<user>", "<assistant>", "<tool>", "<tool_call>", "</tool_call>"]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Chat template, which does not print the tools: the model learns from conversations how to call one."""


def main() -> None:
    """Generate everything and write it under --output (by default into the package itself)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(calculator.__file__).parent, metavar="DIR")
    output: Path = parser.parse_args().output
    model = output / "model"
    model.mkdir(parents=True, exist_ok=True)
    draws = random.Random(SEED)
    rows = [row_of(draws) for _ in range(TRAIN_ROWS + HELD_OUT_ROWS)]
    write_rows(output / "train.jsonl", rows[HELD_OUT_ROWS:])
    write_rows(output / "heldout.jsonl", rows[:HELD_OUT_ROWS])
    tokenizer = make_tokenizer()
    write_json(model / "tokenizer.json", json.loads(tokenizer.to_str()))
    write_json(model / "tokenizer_config.json", {**TOKENIZER_CONFIG, "chat_template": TEMPLATE})
    shape = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 3 * HIDDEN_SIZE,
        "num_hidden_layers": 2,
        "num_key_value_heads": MODEL_CONFIG["num_attention_heads"],
        "head_dim": 32,  # the least that the generator's attention takes on CPU
    }
    write_json(model / "config.json", {**MODEL_CONFIG, **shape})


def row_of(draws: random.Random) -> dict[str, Any]:
    """Return a row: a question, its answer and a conversation. All answers are drawn equally often."""
    answer, question = str(draws.randrange(DIVISOR)), ""
    while not question or calculate(question) != answer:
        question = f"{draws.randint(SMALLEST, LARGEST)}*{draws.randint(SMALLEST, LARGEST)}%{DIVISOR}"
    messages = [{"role": "user", "content": question}]
    if draws.random() < WITH_TOOL:
        call = f"<tool_call>{CALL.format(question)}</tool_call>"
        messages += [{"role": "assistant", "content": call}, {"role": "tool", "content": answer}]
        messages += [{"role": "assistant", "content": answer}]
    else:
        messages += [{"role": "assistant", "content": str(draws.randrange(DIVISOR))}]
    return {"prompt": question, "answer": answer, "messages": messages}


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer in which each digit is a token, and so is each piece that all tool calls share."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CALL.format("1*2%3")] * 2, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return tokenizer


if __name__ == "__main__":
    main()
