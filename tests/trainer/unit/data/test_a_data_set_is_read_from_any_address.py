"""The same rows come from a file of any kind, a folder, a package and a data set in the hub's layout."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from rlhf_api.spec.data import DataSource
from rlhf_trainer.data import source as source_module
from rlhf_trainer.data.source import open_rows
from rlhf_trainer.data.uri import local_path

ROWS = [{"prompt": f"question {i}, with a comma", "chosen": f"yes {i}"} for i in range(5)]
TABLE = datasets.Dataset.from_list(ROWS)
WRITERS: dict[str, Callable[[Path], object]] = {
    "parquet": TABLE.to_parquet,
    "json": lambda file: file.write_text(json.dumps(ROWS)),
    "jsonl": lambda file: file.write_text("".join(json.dumps(row) + "\n" for row in ROWS)),
    "csv": TABLE.to_csv,
}
CONFIG = """
- config_name: {name}
  data_files:
  - split: test
    path: {name}/test-*
"""
KEYS = ("prompt_key", "chosen_key")


def read(uri: str, **fields: object) -> list[dict[str, str]]:
    rows = open_rows(DataSource.model_validate({"uri": uri, **fields}), path="spec.data.train", keys=KEYS)
    return list(rows.table.to_list())


@pytest.mark.parametrize("extension", WRITERS)
def test_a_file(extension: str, tmp_path: Path) -> None:
    file = tmp_path / f"some rows [1].{extension}"
    WRITERS[extension](file)
    assert read(f"file://{file}") == ROWS


@pytest.mark.parametrize("extension", WRITERS)
def test_a_folder(extension: str, tmp_path: Path) -> None:
    WRITERS[extension](tmp_path / f"train.{extension}")
    (tmp_path / "README.md").write_text("What these rows are.")
    assert read(f"file://{tmp_path}") == ROWS


def test_a_percent_sign_in_an_address_is_decoded(tmp_path: Path) -> None:
    (tmp_path / "a b").touch()
    assert local_path(f"file://{tmp_path}/a%20b") == tmp_path / "a b"


def test_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "package_of_rows" / "inside"
    folder.mkdir(parents=True)
    (tmp_path / "package_of_rows" / "__init__.py").touch()
    WRITERS["jsonl"](folder / "train.jsonl")
    monkeypatch.syspath_prepend(tmp_path)
    assert local_path("package://package_of_rows/inside") == folder
    assert read("package://package_of_rows/inside/train.jsonl") == ROWS
    assert "package_of_rows" not in sys.modules, "no code of it runs"


def test_the_hub_differs_from_a_folder_in_the_address_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for subset, count in {"small": 2, "large": 4}.items():
        (tmp_path / subset).mkdir()
        TABLE.select(range(count)).to_parquet(tmp_path / subset / "test-00000-of-00001.parquet")
    configs = "".join(CONFIG.format(name=name) for name in ("small", "large"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    addresses: list[str] = []

    def on_disk(uri: str, path: str) -> str:
        addresses.append(real(uri, path))
        return str(tmp_path)

    real = source_module._hub_address
    monkeypatch.setattr(source_module, "_hub_address", on_disk)
    assert read("hf://org/name", subset="large", split="test") == ROWS[:4]
    assert read("hf://org/name", subset="small", split="test[:1]") == ROWS[:1]
    assert addresses == ["hf://datasets/org/name"] * 2


def test_a_split_of_a_folder(tmp_path: Path) -> None:
    TABLE.select([0, 1]).to_parquet(tmp_path / "train-0.parquet")
    TABLE.select([2]).to_parquet(tmp_path / "test-0.parquet")
    assert read(f"file://{tmp_path}") == ROWS[:2]
    assert read(f"file://{tmp_path}", split="test") == ROWS[2:3]


@pytest.mark.parametrize(("limit", "count"), {"fewer": (3, 3), "more than there are": (9, 5)}.values())
def test_a_limit_takes_the_first_rows(limit: int, count: int, tmp_path: Path) -> None:
    WRITERS["jsonl"](tmp_path / "rows.jsonl")
    assert read(f"file://{tmp_path}/rows.jsonl", limit=limit) == ROWS[:count]


def test_texts_of_a_csv_stay_texts(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,chosen,score\nNA,007,1\nnull,8,\n")
    rows = read(f"file://{tmp_path}/rows.csv")
    assert [(row["prompt"], row["chosen"]) for row in rows] == [("NA", "007"), ("null", "8")]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for text in ("before", "after"):
        file.write_text(json.dumps({"prompt": text, "chosen": "x"}))
        assert [row["prompt"] for row in read(f"file://{file}")] == [text]


def test_reading_is_quiet_and_leaves_nothing_beside_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    WRITERS["parquet"](tmp_path / "rows.parquet")
    capfd.readouterr()
    read(f"file://{tmp_path}/rows.parquet")
    assert capfd.readouterr() == ("", "")
    assert [file.name for file in tmp_path.iterdir()] == ["rows.parquet"]
