"""Opening of the data set that a manifest names; errors are one sentence."""

import glob
import hashlib
import logging
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import datasets
from datasets.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from pydantic.alias_generators import to_camel

from rlhf_api.problems import printable
from rlhf_api.spec.data import DataSource, OwnRows, Rows
from rlhf_trainer.data.lines import BEGINNING, Line, are_rows, copy_rows, files_of, lines_of, row_numbers
from rlhf_trainer.data.own_data import own_rows
from rlhf_trainer.data.uri import local_path
from rlhf_trainer.errors import DataError
from rlhf_trainer.hub import HUB, require_hub

NULL_START = re.compile(rb"(?:\xef\xbb\xbf)?[\s\[]*(null|NaN|-?Infinity)")
"""Pattern of the start of a JSON file whose first row `datasets` reads as null."""
KIND_OF_EXTENSION = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


class UnreadableError(DataError):
    """Error for data files that cannot be read as they are; a copy without bad lines may be readable."""


@dataclass(frozen=True)
class OpenedRows:
    """Opened data set: its rows in the order of its files, and the lines that are no rows."""

    table: datasets.Dataset
    files: Sequence[Path] = ()
    """Files on this machine that hold the table; empty for a data set of the hub or of a user's function."""
    left_out: Sequence[Line] = ()
    """Lines of the files that are no rows, such as broken JSON."""

    def place(self, row: int) -> str:
        """Return where a row (from 0) is, for messages: file and line, or the row's number if files have no lines."""
        if row >= len(self._lines):
            return f"row {row} (counted from 0)"
        file, number = self._lines[row]
        return f"{self.files[file]}, line {number}"

    def left_out_before_limit(self, limit: int | None) -> Sequence[Line]:
        """Return the lines that are no rows and stand before the last row to read; limit: number of rows to read."""
        if not self.left_out or limit is None or len(self._lines) < limit:
            return self.left_out
        order = {file: place for place, file in enumerate(self.files)}
        return [line for line in self.left_out if (order.get(line.file, -1), line.number) < self._lines[limit - 1]]

    def values(self, columns: Iterable[str], first: int, count: int, path: str) -> dict[str, list[Any]]:
        """Return the values of `count` rows from `first` on in some columns; DataError for text that is not UTF-8."""
        try:
            found: dict[str, list[Any]] = self.table.select_columns(list(columns))[first : first + count]
        except ValueError as error:  # `datasets` decodes the texts of a Parquet file only here
            with _named(path):
                for file in filter(are_rows, self.files):
                    deque(lines_of(file), maxlen=0)  # raises DataError with the line that is not UTF-8
            raise DataError(f"{path}.uri: rows {first} and later cannot be read: {error}") from error
        return found

    @cached_property
    def _lines(self) -> list[tuple[int, int]]:
        """Position of each row as (index of the file, line), read at first use; empty for files without lines."""
        files = self.files if all(map(are_rows, self.files)) else ()
        return [(place, line) for place, file in enumerate(files) for line in row_numbers(file, self.left_out)]


def open_rows(
    source: Rows,
    *,
    path: str,
    keys: Sequence[str] = (),
    columns: Sequence[str] = (),
    verified: Mapping[str, str] = MappingProxyType({}),
) -> OpenedRows:
    """Open the first `source.limit` rows of `source`, in the order of the file.

    path: field of the source in the manifest ("spec.data.train"), with which every error begins. keys: fields of
    `source` that must name a column ("prompt_key", "chosen_key"). columns: further required columns, of any type.
    verified: column -> field of the manifest that reads it; the cells of such a column in a CSV file are read as texts.
    Neither pickles nor code of the data set are run.
    Raises DataError when the address, the split or a column is missing, when no row can be read, or when a file is not
    UTF-8. For rows of a user's function it raises the errors of `own_rows`.
    """
    texts = [getattr(source, key) for key in keys]
    opened = _opened(source, path, [*texts, *verified])
    named = [*zip(map(to_camel, keys), texts, strict=True), *(("columns", column) for column in columns)]
    for field, column in named:
        if column not in opened.table.column_names:
            there = printable(", ".join(opened.table.column_names))
            read = f", which {verified[column]} reads" if field == "columns" and column in verified else ""
            raise DataError(f"{path}.{field}: {source.address} has no column {column!r}{read}; its columns are {there}")
    if source.limit is None:
        return opened
    return replace(opened, table=opened.table.select(range(min(source.limit, len(opened.table)))))


def _opened(source: Rows, path: str, texts: list[str]) -> OpenedRows:
    if isinstance(source, OwnRows):
        return OpenedRows(own_rows(source, path))
    assert isinstance(source, DataSource), "there are no other rows"
    if not source.uri.startswith(HUB):
        return _open_local(source, path, texts)
    address = _hub_address(source.uri, path)
    require_hub(source.uri, f"{path}.uri", "dataset")
    return _load(address, source, path)


def _hub_address(uri: str, path: str) -> str:
    name = uri.removeprefix(HUB)
    if name.count("/") != 1 or name.startswith("/") or name.endswith("/"):
        raise DataError(f"{path}.uri: {uri} is not of the form hf://organisation/name")
    return f"hf://datasets/{name}"  # without this prefix a local folder of that name would be taken


def _open_local(source: DataSource, path: str, columns: list[str]) -> OpenedRows:
    with _named(path):
        found = local_path(source.uri)
    kind = _kind_of_folder(found, path) if found.is_dir() else _kind_of_file(found, path)
    options: dict[str, Any] = {}
    if kind == "csv":  # texts such as "NA" and "12" stay texts; empty cells are missing values
        texts = dict.fromkeys(columns, str)
        options = {"keep_default_na": False, "na_values": "", "converters": texts}
    if found.is_file() and source.subset is not None:
        raise DataError(f"{path}.subset: {found} is one file and has no subset {source.subset!r}")
    try:
        return _open_place(found, kind, source, path, options)
    except UnreadableError as error:
        return _open_rows_alone(found, kind, source, path, options, error)


def _open_rows_alone(
    found: Path, kind: str, source: DataSource, path: str, options: Mapping[str, Any], error: DataError
) -> OpenedRows:
    """Open JSON or CSV files with bad lines through a copy of their good lines; changed files get a new copy.

    Raises `error`, the failure to open the original, if the copy has no rows or cannot be opened either.
    """
    now = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files_of(found)]
    version = hashlib.sha256(f"{found} {now}".encode(errors="replace")).hexdigest()[:16]
    copy = Path(datasets.config.HF_DATASETS_CACHE) / "rows" / version / found.name
    with _named(path):
        rows, left_out = copy_rows(found, copy)
    if not rows:
        raise error
    try:
        opened = _open_place(copy, kind, source, path, options)
    except DataError:
        raise error from None
    return replace(opened, files=[found / os.path.relpath(file, copy) for file in opened.files], left_out=left_out)


def _open_place(place: Path, kind: str, source: DataSource, path: str, options: Mapping[str, Any]) -> OpenedRows:
    """Open a data set that is a file or a folder on this machine."""
    if kind == "json":
        _require_no_null(place, path)
    if place.is_dir():
        return _load(str(place), source, path, **options)
    return _load(kind, source, path, data_files={"train": [glob.escape(str(place))]}, **options)


def _kind_of_file(file: Path, path: str) -> str:
    kind = KIND_OF_EXTENSION.get(file.suffix.lower())
    if kind is None:
        raise DataError(f"{path}.uri: {file} does not end in {_extensions()}")
    if file.stat().st_size == 0:
        raise DataError(f"{path}.uri: {file} is empty")
    return kind


def _kind_of_folder(folder: Path, path: str) -> str:
    names = {file.suffix.lower() for file in files_of(folder)}
    kinds = {KIND_OF_EXTENSION[name] for name in names & KIND_OF_EXTENSION.keys()}
    if not kinds:
        raise DataError(f"{path}.uri: no file in the folder {folder} ends in {_extensions()}")
    if len(kinds) > 1:
        raise DataError(f"{path}.uri: the folder {folder} mixes files of several kinds ({', '.join(sorted(kinds))})")
    return kinds.pop()


def _require_no_null(place: Path, path: str) -> None:
    """Raise UnreadableError for a JSON file that begins with null: pyarrow's reader would crash with a segfault."""
    for file in (each for each in files_of(place) if KIND_OF_EXTENSION.get(each.suffix.lower()) == "json"):
        with file.open("rb") as opened:
            beginning = opened.read(BEGINNING)
        if found := NULL_START.match(beginning):
            raise UnreadableError(f"{path}.uri: {file} begins with {found[1].decode()}, which is no row")


def _extensions() -> str:
    *first, last = KIND_OF_EXTENSION
    return f"{', '.join(first)} or {last}"


def _load(address: str, source: DataSource, path: str, **options: Any) -> OpenedRows:
    """Open one split of a data set by `datasets`; address: hub address, folder, or a file format such as "csv"."""
    try:
        with _quiet():
            builder = datasets.load_dataset_builder(address, source.subset, **options)
            builder.download_and_prepare()
            sizes = {name: split.num_examples for name, split in builder.info.splits.items()}
            _require_split(source, sizes, path)
            files = (builder.config.data_files or {}).get(source.split, [])
            here = [Path(file) for file in files if Path(file).is_absolute()]
            return OpenedRows(builder.as_dataset(source.split), here)
    except StopIteration as error:  # a folder whose files are all empty
        raise DataError(f"{path}.uri: {source.uri} has no rows") from error
    except ConnectionError as error:
        raise DataError(f"{path}.uri: the Hugging Face Hub cannot be reached for {source.uri}") from error
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(f"{path}.uri: the Hugging Face Hub has no {source.uri} that this user may read") from error
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError, TypeError, LookupError) as error:
        raise UnreadableError(f"{path}.uri: {source.uri} cannot be read: {_cause(error)}") from error


def _require_split(source: DataSource, sizes: dict[str, int], path: str) -> None:
    """Raise DataError unless all splits named in `source.split` (such as "train[:10%]+test") exist and have rows."""
    for name in (part.partition("[")[0].strip() for part in source.split.split("+")):
        if name not in sizes:
            raise DataError(f"{path}.split: {source.uri} has no split {name!r}; its splits are {', '.join(sizes)}")
        if sizes[name] == 0:
            raise DataError(f"{path}.uri: {source.uri} has no rows")


def _cause(error: BaseException) -> str:
    """Return the first line of the original error, without the general errors in which `datasets` wraps it."""
    while isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Put the manifest's field `path`.uri before the text of each DataError that is raised in the block."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{path}.uri: {error}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Switch off progress bars and log lines of `datasets`, whose content a DataError repeats."""
    bars, verbosity = not are_progress_bars_disabled(), datasets.logging.get_verbosity()
    disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars:
            enable_progress_bars()
