"""A row that is broken, or lacks what is read, is counted and named by its file and line; the others are trained on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from rlhf_api.spec.data import DataSource
from rlhf_trainer.data.loaders import CompletionLoader, PairLoader
from rlhf_trainer.errors import DataError
from tests.trainer.unit.data.conftest import spec_of

GOOD = json.dumps({"prompt": "abc", "chosen": "d", "rejected": "e"})
SPEC = spec_of(100, 100)
FAILS = spec_of(100, 100, on_bad_row="Fail")
Load = Callable[..., PairLoader]


@pytest.fixture
def load(tmp_path: Path, plain: PreTrainedTokenizerFast) -> Load:
    """(name of a file, its bytes, whether a bad row ends it) -> the pairs in it."""

    def loader(name: str, data: str | bytes, *, fails: bool = False) -> PairLoader:
        file = tmp_path / name
        file.write_bytes(data.encode() if isinstance(data, str) else data)
        source = DataSource(uri=f"file://{file}")
        return PairLoader(source, plain, path="spec.data.train", spec=FAILS if fails else SPEC)

    return loader


LINES = {
    "half a row": ('{"prompt": "abc", "chosen"', "uri", "is no JSON: Expecting ':' delimiter at 27"),
    "no JSON": ("Human: hi", "uri", "is no JSON: Expecting value at 1"),
    "half a text": ('{"prompt": "abc', "uri", "is no JSON: Unterminated string starting at 12"),
    "a list": ("[1, 2]", "uri", "is no JSON object"),
    "null": ("null", "uri", "is no JSON object"),
    "an empty row": ("{}", "promptKey", "holds nothing, not a text or a list of messages"),
    "no response": (json.dumps({"prompt": "a", "chosen": None, "rejected": "b"}), "chosenKey", "holds nothing, not a"),
    "no text": (json.dumps({"prompt": "", "chosen": "a", "rejected": "b"}), "promptKey", "is empty"),
    "another type": (json.dumps({"prompt": 3, "chosen": "a", "rejected": "b"}), "promptKey", "holds a value of type"),
}


PLACES = [
    (name, first)
    for name in LINES
    for first in (True, False)
    if (name, first) not in (("a list", True), ("null", False))
]
"""A file that begins with a list is one list of rows, and a later null is a row without anything."""


@pytest.mark.parametrize(("name", "first"), PLACES)
def test_a_line_of_json(name: str, first: bool, load: Load, tmp_path: Path) -> None:
    line, field, what = LINES[name]
    bad, lines = (2, ["", line, GOOD, GOOD]) if first else (4, [GOOD, "", GOOD, line, GOOD])
    loader = load("rows.jsonl", "\n".join(lines))
    assert len(loader) == lines.count(GOOD)
    (named,) = loader.readers[0].named
    assert named.startswith(f"spec.data.train.{field}: {tmp_path}/rows.jsonl, line {bad} {what}")
    assert loader.facts() == [f"spec.data.train: 1 of {len(loader) + 1} rows are bad and were dropped, such as {named}"]
    with pytest.raises(DataError) as raised:
        load("rows.jsonl", "\n".join(lines), fails=True)
    assert str(raised.value) == named


def test_rows_after_a_broken_one_keep_their_lines(load: Load) -> None:
    loader = load("rows.jsonl", f"nonsense\n{GOOD}\n{{}}\nmore\n{{}}\n{{}}\n{GOOD}")
    assert (len(loader), loader.readers[0].bad) == (2, 5)
    assert [named.partition(" line ")[2].split()[0] for named in loader.readers[0].named] == ["1", "4", "3"]


def test_a_record_of_csv(load: Load, tmp_path: Path) -> None:
    rows = 'prompt,chosen,rejected\n"a\nb",c,d\ne,f,g,h\n,i,j\nk,l,m\n'
    loader = load("rows.csv", rows)
    assert len(loader) == 2
    assert loader.readers[0].named == [
        f"spec.data.train.uri: {tmp_path}/rows.csv, line 4 has 4 fields, and the header 3",
        f"spec.data.train.promptKey: {tmp_path}/rows.csv, line 5 holds nothing, not a text or a list of messages",
    ]


def test_a_file_of_a_folder(tmp_path: Path, plain: PreTrainedTokenizerFast) -> None:
    (tmp_path / "data").mkdir()
    for name, lines in {"a": [GOOD, GOOD], "b": [GOOD, "nonsense", "{}"]}.items():
        (tmp_path / "data" / f"{name}.jsonl").write_text("\n".join(lines))
    source = DataSource(uri=f"file://{tmp_path}/data")
    loader = CompletionLoader(source, plain, path="x", spec=SPEC)
    assert len(loader) == 3
    assert [named.partition(f"{tmp_path}/data/")[2] for named in loader.readers[0].named] == [
        "b.jsonl, line 2 is no JSON: Expecting value at 1",
        "b.jsonl, line 3 holds nothing, not a text or a list of messages",
    ]


def test_what_is_left_of_a_file_is_read_anew_when_it_changes(load: Load) -> None:
    assert [len(load("rows.jsonl", "\n".join(["nonsense", *[GOOD] * count]))) for count in (1, 3)] == [1, 3]


def test_a_row_of_parquet_is_named_by_its_number(tmp_path: Path, plain: PreTrainedTokenizerFast) -> None:
    import datasets

    file = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([{"prompt": "a", "chosen": "b"}, {"prompt": None, "chosen": "c"}]).to_parquet(file)
    loader = CompletionLoader(DataSource(uri=f"file://{file}"), plain, path="x", spec=SPEC)
    assert loader.readers[0].named == [
        "x.promptKey: row 1 (counted from 0) holds nothing, not a text or a list of messages"
    ]


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize(
    ("name", "lines"),
    {
        "rows.jsonl": [GOOD, GOOD.replace('"d"', '"\u00e9"')],
        "rows.csv": ["prompt,chosen,rejected", "a,\u00e9,b"],
    }.items(),
)
def test_a_file_that_is_not_utf_8(name: str, lines: list[str], load: Load, tmp_path: Path, *, fails: bool) -> None:
    with pytest.raises(DataError) as raised:
        load(name, "\n".join(lines).encode("latin-1"), fails=fails)
    place = f"spec.data.train.uri: {tmp_path}/{name}, line 2 is not UTF-8 (byte 0xe9 at "
    assert str(raised.value).startswith(place)


def test_nothing_but_bad_rows(load: Load) -> None:
    with pytest.raises(DataError, match=r"^spec.data.train: all 2 rows of .* are bad: spec.data.train.promptKey: "):
        load("rows.jsonl", "\n".join([json.dumps({"prompt": None, "chosen": "a", "rejected": "b"})] * 2))


def test_a_file_that_is_one_list_is_whole_or_nothing(load: Load) -> None:
    assert len(load("rows.json", f"[{GOOD}, {GOOD}]")) == 2
    with pytest.raises(DataError, match="cannot be read"):
        load("rows.json", f"[{GOOD}, {GOOD}")


def test_a_broken_line_after_the_last_row_read_is_nobodys(tmp_path: Path, plain: PreTrainedTokenizerFast) -> None:
    (tmp_path / "rows.jsonl").write_text(f"broken\n{GOOD}\n{GOOD}\nbroken\n{GOOD}")
    source = DataSource(uri=f"file://{tmp_path}/rows.jsonl", limit=2)
    made = PairLoader(source, plain, path="spec.data.train", spec=SPEC)
    assert (len(made), made.readers[0].bad) == (2, 1)


def test_a_file_taken_out_of_a_folder_is_not_read_any_more(tmp_path: Path, plain: PreTrainedTokenizerFast) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(f"broken\n{GOOD}\n")

    def count() -> int:
        return len(PairLoader(DataSource(uri=f"file://{tmp_path}"), plain, path="x", spec=SPEC))

    assert count() == 2
    (tmp_path / "two.jsonl").unlink()
    assert count() == 1
