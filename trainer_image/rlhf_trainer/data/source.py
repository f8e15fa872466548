"""Opens the data set that a manifest names; errors are one sentence."""

import glob
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from datasets.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from pydantic.alias_generators import to_camel

from rlhf_api.problems import printable
from rlhf_api.spec import DataSource
from rlhf_trainer.data.uri import local_path
from rlhf_trainer.errors import DataError

HUB = "hf://"
BEGINNING = 4096
"""Bytes of a file that are looked at before it is read."""
NO_ROW = re.compile(rb"(?:\xef\xbb\xbf)?[\s\[]*(null|NaN|-?Infinity)")
"""`datasets` makes a null of all of them."""
KIND_OF_EXTENSION = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def open_rows(source: DataSource, *, path: str, keys: Sequence[str] = ()) -> datasets.Dataset:
    """The rows of `source`, the first `source.limit` of them, in the order of the file.

    `path` is the source's place in the manifest ("spec.data.train") and opens every message; `keys` are the fields of
    `source` that must name a column ("prompt_key", "chosen_key"). Neither pickles nor code of the data set are run.
    Raises DataError when the address, the split or a column is missing, or when no row can be read.
    """
    if source.uri.startswith(HUB):
        rows = _load(_hub_address(source.uri, path), source, path)
    else:
        rows = _open_local(source, path, [getattr(source, key) for key in keys])
    for key in keys:
        if (column := getattr(source, key)) not in rows.column_names:
            there = printable(", ".join(rows.column_names))
            raise DataError(f"{path}.{to_camel(key)}: {source.uri} has no column {column!r}; its columns are {there}")
    return rows if source.limit is None else rows.select(range(min(source.limit, len(rows))))


def _hub_address(uri: str, path: str) -> str:
    name = uri.removeprefix(HUB)
    if name.count("/") != 1 or name.startswith("/") or name.endswith("/"):
        raise DataError(f"{path}.uri: {uri} is not of the form hf://organisation/name")
    return f"hf://datasets/{name}"  # without this prefix a local folder of that name would be taken


def _open_local(source: DataSource, path: str, columns: list[str]) -> datasets.Dataset:
    try:
        found = local_path(source.uri)
    except DataError as error:
        raise DataError(f"{path}.uri: {error}") from error
    kind = _kind_of_folder(found, path) if found.is_dir() else _kind_of_file(found, path)
    if kind == "json":
        _require_no_null(found, path)
    options: dict[str, Any] = {}
    if kind == "csv":  # texts such as "NA" and "12" stay texts; empty cells are missing values
        texts = dict.fromkeys(columns, str)
        options = {"keep_default_na": False, "na_values": "", "converters": texts}
    if found.is_dir():
        return _load(str(found), source, path, **options)
    if source.subset is not None:
        raise DataError(f"{path}.subset: {found} is one file and has no subset {source.subset!r}")
    return _load(kind, source, path, data_files={"train": [glob.escape(str(found))]}, **options)


def _kind_of_file(file: Path, path: str) -> str:
    kind = KIND_OF_EXTENSION.get(file.suffix.lower())
    if kind is None:
        raise DataError(f"{path}.uri: {file} does not end in {_extensions()}")
    if file.stat().st_size == 0:
        raise DataError(f"{path}.uri: {file} is empty")
    return kind


def _kind_of_folder(folder: Path, path: str) -> str:
    names = sorted(file.suffix.lower() for file in folder.rglob("*") if file.is_file())
    kinds = {KIND_OF_EXTENSION[name] for name in names if name in KIND_OF_EXTENSION}
    if not kinds:
        raise DataError(f"{path}.uri: no file in the folder {folder} ends in {_extensions()}")
    if len(kinds) > 1:
        raise DataError(f"{path}.uri: the folder {folder} mixes files of several kinds ({', '.join(sorted(kinds))})")
    return kinds.pop()


def _require_no_null(place: Path, path: str) -> None:
    """DataError for a file that begins with null: pyarrow's reader would end this process by a segmentation fault."""
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    for file in (each for each in files if KIND_OF_EXTENSION.get(each.suffix.lower()) == "json"):
        with file.open("rb") as opened:
            beginning = opened.read(BEGINNING)
        if found := NO_ROW.match(beginning):
            raise DataError(f"{path}.uri: {file} begins with {found[1].decode()}, which is no row")


def _extensions() -> str:
    *first, last = KIND_OF_EXTENSION
    return f"{', '.join(first)} or {last}"


def _load(address: str, source: DataSource, path: str, **options: Any) -> datasets.Dataset:
    """One split of what `datasets` finds at `address`: a data set of the hub, a folder, or a kind of file."""
    try:
        with _quiet():
            builder = datasets.load_dataset_builder(address, source.subset, **options)
            builder.download_and_prepare()
            sizes = {name: split.num_examples for name, split in builder.info.splits.items()}
            _require_split(source, sizes, path)
            return builder.as_dataset(source.split)
    except ConnectionError as error:
        raise DataError(f"{path}.uri: the Hugging Face Hub cannot be reached for {source.uri}") from error
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(f"{path}.uri: the Hugging Face Hub has no {source.uri} that this user may read") from error
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError, TypeError, LookupError) as error:
        raise DataError(f"{path}.uri: {source.uri} cannot be read: {_cause(error)}") from error


def _require_split(source: DataSource, sizes: dict[str, int], path: str) -> None:
    """`source.split` may be a slice or a sum, such as "train[:10%]+test"."""
    for name in (part.partition("[")[0].strip() for part in source.split.split("+")):
        if name not in sizes:
            raise DataError(f"{path}.split: {source.uri} has no split {name!r}; its splits are {', '.join(sizes)}")
        if sizes[name] == 0:
            raise DataError(f"{path}.uri: {source.uri} has no rows")


def _cause(error: BaseException) -> str:
    """The first line of the original error, which `datasets` wraps in general ones."""
    while isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, and no log lines of what the DataError will say."""
    bars, verbosity = not are_progress_bars_disabled(), datasets.logging.get_verbosity()
    disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars:
            enable_progress_bars()
