"""Lines of JSON and CSV files: which are rows, their line numbers, and copies of files without bad and empty lines."""

import csv
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

from rlhf_trainer.errors import DataError

KINDS = (".json", ".jsonl", ".csv")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BEGINNING = 4096
"""Number of bytes at the start of a data file that show its kind."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A non-empty line of a file; in a CSV file a record, which may span several lines."""

    file: Path
    number: int
    """Number of the line in its file, from 1."""
    text: str
    problem: str = ""
    """Reason why the line is no row, to follow its place in a sentence; empty for rows and the header of a CSV file."""

    def __str__(self) -> str:
        return f"{self.file}, line {self.number}"


def are_rows(file: Path) -> bool:
    """Whether each line of a file is a row; false for Parquet, and for a JSON file that is one list."""
    with file.open("rb") as opened:
        beginning = opened.read(BEGINNING).removeprefix(BYTE_ORDER_MARK).lstrip()
    return file.suffix.lower() in KINDS and (_is_csv(file) or not beginning.startswith(b"["))


def lines_of(file: Path) -> Iterator[Line]:
    """Yield the lines of a file for which `are_rows` holds; DataError with the line for text that is not UTF-8."""
    texts = _texts(file)
    if _is_csv(file):
        yield from _records(file, texts)
        return
    for number, text in enumerate(texts, start=1):
        if text.strip():
            yield Line(file=file, number=number, text=text, problem=_no_object(text))


def row_numbers(file: Path, left_out: Sequence[Line]) -> Iterator[int]:
    """Yield the line number of each row of a file, without the lines in `left_out`."""
    bad = {line.number for line in left_out if line.file == file}
    numbers = (line.number for line in lines_of(file) if line.number not in bad)
    return islice(numbers, int(_is_csv(file)), None)


def copy_rows(place: Path, copy: Path) -> tuple[int, list[Line]]:
    """Copy a data file, or all files of a folder, without bad and empty lines; returns (rows copied, bad lines)."""
    rows, left_out = 0, list[Line]()
    for file in files_of(place):
        target = copy / os.path.relpath(file, place)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.{os.getpid()}")
        if are_rows(file):
            with unfinished.open("w", encoding="utf-8", newline="") as opened:
                rows += _write_rows(file, opened, left_out)
        else:
            shutil.copy(file, unfinished)
        shutil.copystat(file, unfinished)  # `datasets` keys its cache by the file's time
        unfinished.replace(target)
    return rows, left_out


def files_of(place: Path) -> list[Path]:
    """Return the files of a data set at a path: the file itself, or the files below a folder, sorted."""
    return [file for file in (sorted(place.rglob("*")) if place.is_dir() else [place]) if file.is_file()]


def _write_rows(file: Path, target: TextIO, left_out: list[Line]) -> int:
    """Write the good lines of a file to `target`, and add its bad lines to `left_out`; return the number written."""
    rows = 0
    for line in lines_of(file):
        if line.problem:
            left_out.append(line)
        else:
            target.write(line.text)
            rows += 1
    return rows


def _is_csv(file: Path) -> bool:
    return file.suffix.lower() == ".csv"


def _texts(file: Path) -> Iterator[str]:
    with file.open("rb") as opened:
        for number, line in enumerate(opened, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                byte = f"byte {line[error.start]:#04x} at {error.start + 1}"
                raise DataError(f"{file}, line {number} is not UTF-8 ({byte}); save the file as UTF-8") from error


def _no_object(text: str) -> str:
    """Return why a line of a JSON file is no row; empty if the line is an object."""
    try:
        value = json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        return f"is no JSON: {error.msg.removesuffix(' at')} at {error.colno}"
    except (RecursionError, ValueError):
        return "is no JSON that can be read"
    return "" if isinstance(value, dict) else "is no JSON object"


def _records(file: Path, texts: Iterator[str]) -> Iterator[Line]:
    """Yield the header and the records of a CSV file."""
    read: list[str] = []

    def remembered() -> Iterator[str]:
        for text in texts:
            read.append(text)
            yield text

    reader, fields, number = csv.reader(remembered()), 0, 1
    try:
        for record in reader:
            fields = fields or len(record)
            problem = f"has {len(record)} fields, and the header {fields}" if len(record) > fields else ""
            if record:
                yield Line(file=file, number=number, text="".join(read), problem=problem)
            read.clear()
            number = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.line_num} is no CSV: {error}") from error
