"""Lines of JSON and CSV files: which of them are rows, on which line a row is, and a copy of the rows alone."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_trainer.errors import DataError

KINDS = (".json", ".jsonl", ".csv")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BEGINNING = 4096
"""Bytes of a file that are looked at to see what it is."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a file that is not empty; in a CSV file a record, which may go on over several."""

    file: Path
    number: int
    """From 1."""
    text: str
    problem: str = ""
    """Why it is no row, as it goes on after the place; empty for a row, and for the header of a CSV file."""

    def __str__(self) -> str:
        return f"{self.file}, line {self.number}"


def are_rows(file: Path) -> bool:
    """Whether each line of a file is a row: not of Parquet, nor of a JSON file that is one list."""
    with file.open("rb") as opened:
        beginning = opened.read(BEGINNING).removeprefix(BYTE_ORDER_MARK).lstrip()
    return file.suffix.lower() in KINDS and (_is_csv(file) or not beginning.startswith(b"["))


def lines_of(file: Path) -> Iterator[Line]:
    """The lines of a file whose lines are rows; DataError that names the line for a file that is not UTF-8."""
    texts = _texts(file)
    if _is_csv(file):
        yield from _records(file, texts)
        return
    for number, text in enumerate(texts, start=1):
        if text.strip():
            yield Line(file=file, number=number, text=text, problem=_no_object(text))


def row_numbers(file: Path, left_out: Sequence[Line]) -> list[int]:
    """The line of each row of such a file of which some lines were left out."""
    bad = {line.number for line in left_out if line.file == file}
    found = [line.number for line in lines_of(file) if line.number not in bad]
    return found[1:] if _is_csv(file) else found


def rows_and_others(place: Path) -> tuple[int, list[Line]]:
    """(how many rows, the lines that are none) of a file, or of all files of a folder, whose lines are rows."""
    files = [file for file in (sorted(place.rglob("*")) if place.is_dir() else [place]) if file.is_file()]
    rows, others = 0, []
    for line in (line for file in files if are_rows(file) for line in lines_of(file)):
        rows += not line.problem
        if line.problem:
            others.append(line)
    return rows, others


def copy_rows(place: Path, copy: Path) -> None:
    """Copy a file, or all files of a folder, but for lines that are no rows, and empty ones."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        shutil.copytree(place, copy, copy_function=_copy_rows, dirs_exist_ok=True)
    else:
        _copy_rows(str(place), str(copy))


def _copy_rows(source: str, copy: str) -> None:
    file, unfinished = Path(source), Path(f"{copy}.{os.getpid()}")
    if are_rows(file):
        with unfinished.open("w", encoding="utf-8", newline="") as opened:
            opened.writelines(line.text for line in lines_of(file) if not line.problem)
    else:
        shutil.copy(file, unfinished)
    shutil.copystat(file, unfinished)  # `datasets` knows by the time whether it has read a file before
    unfinished.replace(copy)


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
    """Why a line of JSON is no row."""
    try:
        value = json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        return f"is no JSON: {error.msg.removesuffix(' at')} at {error.colno}"
    except (RecursionError, ValueError):
        return "is no JSON that can be read"
    return "" if isinstance(value, dict) else "is no JSON object"


def _records(file: Path, texts: Iterator[str]) -> Iterator[Line]:
    """The header and the records of a CSV file."""
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
