"""A data source that cannot be read is a DataError: one sentence with the manifest's field and what is there."""

import json
import logging
import pickle
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import datasets
import pytest
from huggingface_hub import constants

from rlhf_api.job import Job
from rlhf_api.spec.data import DataSource
from rlhf_trainer import hub
from rlhf_trainer.data.source import open_rows
from rlhf_trainer.data.uri import local_path
from rlhf_trainer.errors import DataError
from rlhf_trainer.run_folder.folder import model_folders
from tests.api.cases import made

ROW = {"prompt": "a", "chosen": "b"}


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        import os

        return os.mkdir, (str(self._folder),)


class Case(NamedTuple):
    source: dict[str, object]
    files: dict[str, str]
    sentence: str


def rows(*rows: Mapping[str, object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


CASES = {
    "a missing file": Case(
        {"uri": "file://{tmp}/no.jsonl"},
        {},
        "spec.data.train.uri: file://{tmp}/no.jsonl: there is no file or folder {tmp}/no.jsonl",
    ),
    "a relative file": Case(
        {"uri": "file://no.jsonl"},
        {},
        "spec.data.train.uri: file://no.jsonl: a file:// address is absolute, as file:///folder/file",
    ),
    "a missing package": Case(
        {"uri": "package://no_such_package/rows.jsonl"},
        {},
        "spec.data.train.uri: package://no_such_package/rows.jsonl: "
        "no Python package named 'no_such_package' is installed",
    ),
    "a missing file of a package": Case(
        {"uri": "package://json/no.jsonl"},
        {},
        "spec.data.train.uri: package://json/no.jsonl: there is no file or folder ",
    ),
    "an empty file": Case(
        {"uri": "file://{tmp}/rows.jsonl"}, {"rows.jsonl": ""}, "spec.data.train.uri: {tmp}/rows.jsonl is empty"
    ),
    "a folder of empty files": Case(
        {"uri": "file://{tmp}"}, {"a.jsonl": ""}, "spec.data.train.uri: file://{tmp} has no rows"
    ),
    "no rows in an empty list": Case(
        {"uri": "file://{tmp}/rows.json"},
        {"rows.json": "[]"},
        "spec.data.train.uri: file://{tmp}/rows.json has no rows",
    ),
    "no rows below the header": Case(
        {"uri": "file://{tmp}/rows.csv"},
        {"rows.csv": "prompt,chosen\n"},
        "spec.data.train.uri: file://{tmp}/rows.csv has no rows",
    ),
    "an extension of another kind": Case(
        {"uri": "file://{tmp}/rows.pkl"},
        {"rows.pkl": "x"},
        "spec.data.train.uri: {tmp}/rows.pkl does not end in .parquet, .json, .jsonl or .csv",
    ),
    "a folder without data": Case(
        {"uri": "file://{tmp}"},
        {"notes.txt": "x"},
        "spec.data.train.uri: no file in the folder {tmp} ends in .parquet, .json, .jsonl or .csv",
    ),
    "a folder of two kinds": Case(
        {"uri": "file://{tmp}"},
        {"a.csv": "prompt\nx\n", "b.jsonl": rows(ROW)},
        "spec.data.train.uri: the folder {tmp} mixes files of several kinds (csv, json)",
    ),
    "a missing split": Case(
        {"uri": "file://{tmp}", "split": "tset"},
        {"train.jsonl": rows(ROW), "test.jsonl": rows(ROW)},
        "spec.data.train.split: file://{tmp} has no split 'tset'; its splits are train, test",
    ),
    "a missing split of a file": Case(
        {"uri": "file://{tmp}/rows.jsonl", "split": "train[:1]+test"},
        {"rows.jsonl": rows(ROW)},
        "spec.data.train.split: file://{tmp}/rows.jsonl has no split 'test'; its splits are train",
    ),
    "a split without end": Case(
        {"uri": "file://{tmp}/rows.jsonl", "split": "train[:x]"},
        {"rows.jsonl": rows(ROW)},
        "spec.data.train.uri: file://{tmp}/rows.jsonl cannot be read: ",
    ),
    "a subset of a file": Case(
        {"uri": "file://{tmp}/rows.jsonl", "subset": "main"},
        {"rows.jsonl": rows(ROW)},
        "spec.data.train.subset: {tmp}/rows.jsonl is one file and has no subset 'main'",
    ),
    "a missing subset of a folder": Case(
        {"uri": "file://{tmp}", "subset": "main"},
        {"rows.jsonl": rows(ROW)},
        "spec.data.train.uri: file://{tmp} cannot be read: BuilderConfig 'main' not found. Available: ['default']",
    ),
    "a missing column for functions": Case(
        {"uri": "file://{tmp}/rows.jsonl", "columns": ["chosen", "answer"]},
        {"rows.jsonl": rows(ROW)},
        "spec.data.train.columns: file://{tmp}/rows.jsonl has no column 'answer'; its columns are prompt, chosen",
    ),
    "a missing column": Case(
        {"uri": "file://{tmp}/rows.jsonl", "chosenKey": "better"},
        {"rows.jsonl": rows(ROW)},
        "spec.data.train.chosenKey: file://{tmp}/rows.jsonl has no column 'better'; its columns are prompt, chosen",
    ),
    "a missing column beside one whose name has a line end": Case(
        {"uri": "file://{tmp}/rows.jsonl", "chosenKey": "better"},
        {"rows.jsonl": rows({"prompt": "x", "a\nb": "y"})},
        "spec.data.train.chosenKey: file://{tmp}/rows.jsonl has no column 'better'; its columns are prompt, a b",
    ),
    "bytes that are not JSON": Case(
        {"uri": "file://{tmp}/rows.json"},
        {"rows.json": '{"prompt": "a",,}'},
        "spec.data.train.uri: file://{tmp}/rows.json cannot be read: JSON parse error: ",
    ),
    "a first row that is null": Case(
        {"uri": "file://{tmp}/rows.jsonl"},
        {"rows.jsonl": "\n null\n null\n"},
        "spec.data.train.uri: {tmp}/rows.jsonl begins with null, which is no row",
    ),
    "a first row that becomes a null": Case(
        {"uri": "file://{tmp}/rows.json"},
        {"rows.json": f"[-Infinity, {json.dumps(ROW)}]"},
        "spec.data.train.uri: {tmp}/rows.json begins with -Infinity, which is no row",
    ),
    "bytes that are not Parquet": Case(
        {"uri": "file://{tmp}/rows.parquet"},
        {"rows.parquet": "abcd"},
        "spec.data.train.uri: file://{tmp}/rows.parquet cannot be read: Parquet file size is 4 bytes",
    ),
    "a data set with code": Case(
        {"uri": "file://{tmp}/code"},
        {"code/code.py": "raise SystemExit", "code/rows.jsonl": rows(ROW)},
        "spec.data.train.uri: file://{tmp}/code cannot be read: Dataset scripts are no longer supported",
    ),
    "a hub that cannot be reached": Case(
        {"uri": "hf://nobody/nothing"},
        {},
        "spec.data.train.uri: the Hugging Face Hub cannot be reached for hf://nobody/nothing",
    ),
    "half a name on the hub": Case(
        {"uri": "hf://json"}, {}, "spec.data.train.uri: hf://json is not of the form hf://organisation/name"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_sentence_for(
    name: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(datasets.logging.get_logger(), "handlers", [caplog.handler])
    case = CASES[name]
    for file, text in case.files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    fields = {**case.source, "uri": str(case.source["uri"]).replace("{tmp}", str(tmp_path))}
    source, keys = DataSource.model_validate(fields), ("prompt_key", "chosen_key")
    with pytest.raises(DataError) as raised:
        open_rows(source, path="spec.data.train", keys=keys, columns=source.columns)
    assert str(raised.value).startswith(case.sentence.replace("{tmp}", str(tmp_path)))
    assert "\n" not in str(raised.value)
    assert (caplog.text, *capfd.readouterr()) == ("", "", "")


def test_another_scheme_is_not_on_disk() -> None:
    with pytest.raises(DataError, match=r"^job://sft: only file:// and package:// name something on this machine's"):
        local_path("job://sft")


def test_a_data_set_that_is_not_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: object, **__: object) -> None:
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' doesn't exist on the Hub.\nMore.")

    monkeypatch.setattr(datasets, "load_dataset_builder", answer)
    with pytest.raises(DataError, match=r"^spec.x.uri: the Hugging Face Hub has no hf://a/b that this user may read$"):
        open_rows(DataSource(uri="hf://a/b"), path="spec.x")


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(pickle.dumps(Code(tmp_path / "was-run")))
    with pytest.raises(DataError, match="cannot be read"):
        open_rows(DataSource(uri=f"file://{tmp_path}/rows.parquet"), path="spec.data.train")
    assert not (tmp_path / "was-run").exists()


def of_data() -> object:
    return open_rows(DataSource(uri="hf://c/d"), path="spec.x")


def of_model() -> object:
    return model_folders(Job.parse({**made("SFT", ("models.actor.uri=hf://c/d",)), "metadata": {"name": "j"}}), Path())


@pytest.mark.parametrize(("read", "field"), [(of_data, "spec.x.uri"), (of_model, "j: spec.models.actor.uri")])
def test_a_silent_hub_is_told_with_the_number_of_the_try(
    read: Callable[[], object], field: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    wait = hub.HUB_SECONDS
    with socket.create_server(("127.0.0.1", 0)) as deaf, caplog.at_level(logging.WARNING):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setattr(hub, "HUB_SECONDS", 0.2)
        monkeypatch.setattr(hub, "_silence", [])
        hub._problem.cache_clear()
        monkeypatch.setattr(hub, "time", SimpleNamespace(sleep=pauses.append))
        with pytest.raises(DataError) as raised:
            read()
        with pytest.raises(
            DataError, match=r"^other: the Hugging Face Hub cannot be reached for hf://e/f \(try 3 of 3"
        ):
            hub.require_hub("hf://e/f", "other", "model")
    cannot = "the Hugging Face Hub cannot be reached for hf://c/d"
    assert caplog.messages == [f"{cannot} (try {number} of 3: no answer within 0.2 s)" for number in (1, 2)]
    assert str(raised.value) == (
        f"{field}: {cannot} (try 3 of 3: no answer within 0.2 s); HF_HUB_OFFLINE=1 reads what was fetched before"
    )
    assert wait * 3 + sum(pauses) <= 20


def test_a_model_that_cannot_be_on_the_hub_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(DataError, match=r"^spec.x.uri: hf://a/b/c is no name on the hub, such as hf://organisation/"):
        hub.require_hub("hf://a/b/c", "spec.x.uri", "model")
