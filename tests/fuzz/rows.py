"""Damaged data sets, and the loaders that read them: batches, or a sentence with the field of the manifest."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_api.files import load
from rlhf_api.spec.data import DataSource
from rlhf_trainer.data.loaders import LOADERS
from rlhf_trainer.training.loading import load_tokenizer
from tests.fuzz.commands import EXAMPLES, MODEL, Case, ended
from tests.fuzz.damage import as_json, damaged, encoded, garbled, odd, torn

ROWS = [
    {"prompt": f"{number}?", "response": "one", "chosen": "two", "rejected": "three", "a": True, "b": False}
    for number in range(4)
]
MESSAGES = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Why?"}]
PATH = "spec.data."
SPEC = load(EXAMPLES[0])[0].spec


def rows(folder: Path) -> Case:
    """Files of rows that were damaged as documents, as texts and as bytes."""
    tokenizer = load_tokenizer(str(MODEL), trust_remote_code=False, revision=None)
    cache = folder / "cache"

    def case(dice: random.Random) -> str:
        datasets.config.HF_DATASETS_CACHE = cache
        file = _write(dice, folder)
        keys: dict[str, Any] = {"prompt_key": "prompt", "chosen_safe_key": "a", "rejected_safe_key": "b"}
        keys["label_key"] = "a"
        if dice.random() < 0.1:
            keys["prompt_key"] = dice.choice(("a", "missing", "promp\u0301t", "response"))
        source = DataSource(uri=f"file://{file}", **keys)
        kind = dice.choice([*LOADERS.values()])
        try:
            how = ended(lambda: kind(source, tokenizer, path="spec.data.train", spec=SPEC).batch(1, batch_size=3), PATH)
        finally:
            shutil.rmtree(cache, ignore_errors=True)
            file.unlink()
        return f"{file.suffix}: {how}"

    return case


def _write(dice: random.Random, folder: Path) -> Path:
    """A file of some kind with damaged rows."""
    base: list[dict[str, Any]] = [dict(each) for each in ROWS[: dice.choice((1, 4, 4))]]
    if dice.random() < 0.3:
        for each in base:
            each["prompt"] = MESSAGES
    found = base if dice.random() < 0.2 else damaged(dice, base)
    kind = dice.choice((".jsonl", ".jsonl", ".json", ".csv", ".parquet"))
    file = folder / f"rows-{dice.getrandbits(64):x}{kind}"
    data = _encoded(dice, found, kind)
    file.write_bytes(torn(dice, data) if dice.random() < 0.3 else data)
    return file


def _encoded(dice: random.Random, found: Any, kind: str) -> bytes:
    """Rows in the form of a kind of file; those that have none in it as JSON."""
    entries = found if isinstance(found, list) else [found]
    if kind == ".parquet":
        try:
            sink = pa.BufferOutputStream()
            pq.write_table(pa.Table.from_pylist(entries), sink)
            return bytes(sink.getvalue())
        except (pa.ArrowException, OverflowError, TypeError, ValueError, AttributeError):
            return encoded(as_json(found))
    if kind == ".json":
        return encoded(as_json(found))
    if kind == ".csv":
        head = ",".join(ROWS[0])
        lines = [",".join(str(value) for value in each.values()) for each in entries if isinstance(each, dict)]
        return encoded(garbled(dice, "\n".join((head, *lines)), (",", '"', "\n", "\r", "\x00", "é", "NA")))
    lines = [json.dumps(each) for each in entries]
    if lines and dice.random() < 0.2:
        lines[dice.randrange(len(lines))] = json.dumps(odd(dice))
    text = "\n".join(lines)
    return encoded(garbled(dice, text) if dice.random() < 0.3 else text)
