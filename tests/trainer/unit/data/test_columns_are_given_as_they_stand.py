"""Columns that a data source names: of each row as they stand in the file, whatever their type."""

import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlhf_api.spec.data import DataMix, DataSource
from rlhf_api.spec.job_spec import Models
from rlhf_trainer.data.loaders import CompletionLoader, PromptLoader
from rlhf_trainer.errors import DataError
from rlhf_trainer.types import Batch, concatenate
from rlhf_trainer.workers.samples import as_bytes, samples_of
from tests.trainer.unit.data.conftest import spec_of

Write = Callable[[Sequence[Mapping[str, object]]], DataSource]
MESSAGES = [{"role": "user", "content": "2 + 2?"}]
ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "answer": "4", "tests": ["f(1)", "f(2)"], "more": {"level": 1, "ok": True}, "size": 0.5},
    {"prompt": "too long", "answer": "never", "tests": [], "more": {"level": 2, "ok": True}, "size": 1.0},
    {"prompt": "b", "answer": "caf\u00e9 \0", "tests": ["x" * 300], "more": {"level": 3, "ok": False}, "size": None},
]
NAMED = ("answer", "tests", "more", "size")


def columns_of(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast) -> list[Mapping[str, Any]]:
    """The columns of the samples that a worker makes of them, as another worker has read them."""
    return columns_in(as_bytes(rows), tokenizer)


def columns_in(found: Tensor, tokenizer: PreTrainedTokenizerFast) -> list[Mapping[str, Any]]:
    size = len(found)
    one, ids = torch.ones(size, 1), torch.zeros(size, 1, dtype=torch.int64)
    texts = {"tokens": ids, "attention_mask": one, "response_mask": one, "finished": one[:, 0], "valid": one[:, 0]}
    batch = Batch(step=1, start=0, size=size, fields={**texts, "columns": found})
    return [sample.columns for sample in samples_of(batch, tokenizer)]


def loader(source: DataSource, tokenizer: PreTrainedTokenizerFast, *columns: str) -> PromptLoader:
    named = source.model_copy(update={"columns": columns})
    return PromptLoader(named, tokenizer, path="spec.data.train", spec=spec_of(7, 7))


def test_a_row_that_was_dropped_takes_its_columns_along(write: Write, plain: PreTrainedTokenizerFast) -> None:
    made = loader(write(ROWS), plain, *NAMED)
    expected = [{name: ROWS[row][name] for name in NAMED} for row in (2, 0, 2)]
    assert columns_of(made.columns(torch.tensor([1, 0, 1])), plain) == expected


def test_a_verifiers_column_comes_along_without_being_named(write: Write, plain: PreTrainedTokenizerFast) -> None:
    reward = Models.model_validate({"reward": {"verifier": {"name": "Math", "answerKey": "size"}}})
    spec = spec_of(9, 9).model_copy(update={"models": reward})
    source = write(ROWS).model_copy(update={"columns": ("answer", "size")})
    made = PromptLoader(source, plain, path="spec.data.train", spec=spec)
    assert columns_of(made.columns(torch.tensor([0])), plain) == [{"answer": "4", "size": 0.5}]
    assert CompletionLoader(write([{"prompt": "a", "chosen": "b"}]), plain, path="x", spec=spec)
    with pytest.raises(DataError, match=r"^x\.columns: .* has no column 'size', which spec\.models\.reward reads; "):
        PromptLoader(write([{"prompt": "a"}]), plain, path="x", spec=spec)


def test_a_row_without_what_a_verifier_reads_is_bad(tmp_path: Path, plain: PreTrainedTokenizerFast) -> None:
    reward = Models.model_validate({"reward": {"verifier": {"name": "Math"}}})
    rows = [
        {"prompt": "a", "answer": 4},
        {"prompt": "b", "answer": None},
        {"prompt": "c"},
        {"prompt": "d", "answer": 0},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = DataSource(uri=f"file://{tmp_path}/rows.jsonl")
    spec = spec_of(9, 9).model_copy(update={"models": reward})
    made = PromptLoader(source, plain, path="spec.data.train", spec=spec)
    assert made.columns(torch.tensor([0, 1])) == [{"answer": 4}, {"answer": 0}]
    place = f"spec.data.train.columns: {tmp_path}/rows.jsonl, line"
    (fact,) = made.facts()
    assert fact.endswith(
        f"2 of 4 rows are bad and were dropped, such as {place} 2 holds no answer; {place} 3 holds no answer"
    )
    strict = spec.model_copy(update={"data": spec.data.model_copy(update={"on_bad_row": "Fail"})})
    with pytest.raises(DataError, match=r"line 2 holds no answer$"):
        PromptLoader(source, plain, path="spec.data.train", spec=strict)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (["5", None], "holds ['5', None] as answer, expected text, a number or a list of these"),
        ([["a"], ["b"]], "holds [['a'], ['b']] as answer, expected text, a number or a list of these"),
        ([], "holds no answer"),
    ],
)
def test_an_answer_that_is_none_is_a_bad_row_before_any_step(
    answer: object, told: str, tmp_path: Path, plain: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "answer": answer}) + "\n")
    spec = spec_of(9, 9, on_bad_row="Fail")
    spec = spec.model_copy(update={"models": Models.model_validate({"reward": {"verifier": {"name": "Math"}}})})
    with pytest.raises(DataError) as caught:
        PromptLoader(DataSource(uri=f"file://{tmp_path}/rows.jsonl"), plain, path="spec.data.train", spec=spec)
    assert str(caught.value).endswith(f"rows.jsonl, line 1 {told}")


def test_the_prompts_column_may_be_one_of_them(write: Write, chat: PreTrainedTokenizerFast) -> None:
    source = write([{"prompt": MESSAGES, "answer": 4}])
    made = PromptLoader(
        source.model_copy(update={"columns": ("prompt", "answer")}), chat, path="x", spec=spec_of(99, 9)
    )
    assert columns_of(made.columns(torch.tensor([0])), chat) == [{"prompt": MESSAGES, "answer": 4}]


def test_a_column_of_a_csv_file_keeps_its_type(tmp_path: Path, plain: PreTrainedTokenizerFast) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer,word\n1,12,NA\n2,7,x\n")
    made = loader(DataSource(uri=f"file://{tmp_path}/rows.csv"), plain, "answer", "word")
    assert columns_of(made.columns(torch.tensor([1, 0])), plain) == [
        {"answer": 7, "word": "x"},
        {"answer": 12, "word": "NA"},
    ]


def test_what_a_verifier_reads_of_a_csv_file_is_text(tmp_path: Path, plain: PreTrainedTokenizerFast) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer\n1,007\n2,3.10\n3,\n")
    reward = Models.model_validate({"reward": {"verifier": {"name": "ExactMatch"}}})
    spec = spec_of(99, 9).model_copy(update={"models": reward})
    made = PromptLoader(DataSource(uri=f"file://{tmp_path}/rows.csv"), plain, path="x", spec=spec)
    assert columns_of(made.columns(torch.arange(len(made))), plain) == [{"answer": "007"}, {"answer": "3.10"}]


def test_another_answer_is_another_digest(write: Write, plain: PreTrainedTokenizerFast) -> None:
    digests = {
        loader(write([{"prompt": "a", "answer": answer}]), plain, *columns).digest
        for answer in (12, 13)
        for columns in (["answer"], [])
    }
    assert len(digests) == 3, "without the column both are the same"


def test_rows_of_different_ranks_fit_together(write: Write, plain: PreTrainedTokenizerFast) -> None:
    made = loader(write(ROWS), plain, *NAMED)
    parts = [as_bytes(made.columns(torch.tensor([example]))) for example in (0, 1)]
    assert parts[0].shape != parts[1].shape
    whole = as_bytes(made.columns(torch.tensor([0, 1])))
    assert columns_in(concatenate(parts), plain) == columns_in(whole, plain)
    assert whole.dtype == torch.uint8


def test_a_value_that_no_function_can_be_given_is_refused(tmp_path: Path, plain: PreTrainedTokenizerFast) -> None:
    table = pd.DataFrame({"prompt": ["a"], "day": [dt.datetime(2026, 1, 1)]})  # noqa: DTZ001
    table.to_parquet(tmp_path / "rows.parquet")
    made = loader(DataSource(uri=f"file://{tmp_path}/rows.parquet"), plain, "day")
    with pytest.raises(ValueError, match=r"^there is a value of type datetime, expected text, numbers, true or false"):
        as_bytes(made.columns(torch.tensor([0])))


def test_a_data_set_of_a_mix_lacks_what_only_others_have(tmp_path: Path, plain: PreTrainedTokenizerFast) -> None:
    """Those whose row was dropped before are no reason to take those of the next data set."""
    texts = {"sums": ["4", "too long", "5"], "code": ["f"]}
    for name, prompts in texts.items():
        rows = [{"prompt": prompt, name: f"{prompt}!"} for prompt in prompts]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = [{"uri": f"file://{tmp_path}/{name}.jsonl", "columns": [name]} for name in texts]
    mix = DataMix.model_validate({"mix": parts})
    made = PromptLoader(mix, plain, path="spec.data.train", spec=spec_of(7, 7))
    expected = [{"sums": "4!", "code": None}, {"sums": "5!", "code": None}, {"sums": None, "code": "f!"}]
    assert made.columns(torch.tensor([0, 1, 2])) == expected


def test_what_is_written_is_json(write: Write, plain: PreTrainedTokenizerFast) -> None:
    (row,) = as_bytes(loader(write(ROWS), plain, "answer").columns(torch.tensor([0])))
    assert json.loads(bytes(row.tolist())) == {"answer": "4"}
