"""What is committed under rlhf_examples is what the scripts write, byte for byte."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL, MIXTURE, TEACHER = (
    {f"{folder}/{name}" for name in ("config.json", "tokenizer.json", "tokenizer_config.json")}
    for folder in ("model", "mixture", "teacher")
)
WRITTEN_BY_THE_SCRIPT = {
    "helpful": {"train.jsonl", "heldout.jsonl", "safety_train.jsonl", "safety_heldout.jsonl", *MODEL},
    "arithmetic": {"train.jsonl", "heldout.jsonl", *MODEL, *MIXTURE, *TEACHER},
    "calculator": {"train.jsonl", "heldout.jsonl", *MODEL},
}


def read_data(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize("task", WRITTEN_BY_THE_SCRIPT)
def test_the_script_reproduces_the_committed_data(task: str, tmp_path: Path) -> None:
    script = EXAMPLES / f"make_{task}.py"
    subprocess.run([sys.executable, str(script), "--output", str(tmp_path)], check=True, timeout=PATIENCE_SECONDS)
    written, committed = read_data(tmp_path), read_data(EXAMPLES / "rlhf_examples" / task)
    assert set(written) == set(committed) == WRITTEN_BY_THE_SCRIPT[task]
    changed = [name for name in written if written[name] != committed[name]]
    assert changed == [], f"run `python {script}` and commit what it writes"


def sums(split: str) -> list[dict[str, str]]:
    text = (EXAMPLES / "rlhf_examples" / "arithmetic" / f"{split}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_no_sum_is_held_out_and_trained_on() -> None:
    train, held_out = ({row["prompt"] for row in sums(split)} for split in ("train", "heldout"))
    assert not train & held_out
    assert (len(train), len(held_out)) == (8**4 - 256, 256)


def test_answers_are_right_and_so_are_three_of_ten_responses() -> None:
    rows = sums("train")
    for row in rows:
        numbers = [int(number) for number in row["prompt"].removesuffix("=").split("+")]
        assert int(row["answer"]) == sum(numbers)
        assert int(row["response"]) in (sum(numbers), max(numbers))
    assert 0.28 < sum(row["response"] == row["answer"] for row in rows) / len(rows) < 0.33
