"""Calls of the user's functions that make the rows of a data set, or the order of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

from rlhf_api.spec.data import OwnRows
from rlhf_api.spec.functions import EntryPoint
from rlhf_trainer.data.order import Examples
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.own_code import own_code

if TYPE_CHECKING:
    import datasets


def own_rows(source: OwnRows, path: str) -> datasets.Dataset:
    """Return the first `source.limit` rows that a user's function gives; a row has None in the columns that it lacks.

    path: field of the source in the manifest. UserCodeError if the function fails or gives no rows.
    """
    import datasets  # imports pandas: seconds that a process without data does not need
    import pyarrow as pa

    subject = f"{path}.entrypoint: {source.entrypoint}"
    with own_code(source.entrypoint, f"{path}.entrypoint") as function:
        rows = list(islice(function(**source.arguments), source.limit))
    for number, row in enumerate(rows):
        if not (isinstance(row, Mapping) and all(isinstance(name, str) for name in row)):
            what = f"gave {row!r:.100} as row {number} (counted from 0), expected a dict whose keys are texts"
            raise UserCodeError(f"{subject} {what}")
    if not rows:
        raise UserCodeError(f"{subject} gave no rows")
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise UserCodeError(f"{subject} gave a column {name!r:.100} that has no one type: {error}") from error
    return datasets.Dataset(pa.table(columns))


def own_order(
    order: EntryPoint, path: str, tables: Sequence[datasets.Dataset], seed: int, source: int, epoch: int
) -> Examples:
    """Return the order of one data set in an epoch (from 0) by the user's function(rows, epoch, seed): int64 [rows].

    tables: all data sets; source: index of the data set to order; path: manifest field, for errors. UserCodeError
    unless the function gives as many row indices as there are rows.
    """
    rows = tables[source]
    with own_code(order.entrypoint, path) as function:
        found = list(function(rows, epoch, seed, **order.arguments))
    last = len(rows) - 1
    if wrong := [number for number in found if not (isinstance(number, Integral) and 0 <= int(number) <= last)]:
        what = f"gave {wrong[0]!r:.100} in epoch {epoch}, expected numbers of rows, from 0 to {last}"
        raise UserCodeError(f"{path}: {order.entrypoint} {what}")
    if len(found) != len(rows):
        what = f"gave {len(found)} numbers in epoch {epoch}, expected one for each of the {len(rows)} rows"
        raise UserCodeError(f"{path}: {order.entrypoint} {what}")
    return np.asarray(found, dtype=np.int64)
