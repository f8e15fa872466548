"""Check of columns: a row is bad if a verifier accepts an empty response or no right one, or its teacher is unknown."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from typing import Any

import torch.distributed as dist

from rlhf_api.job import Job
from rlhf_api.spec.algorithms import Distilling
from rlhf_api.spec.data import Rows
from rlhf_api.spec.verifiers import Comparing, Math, RewardVerifier, Verifier
from rlhf_trainer.rewards.sample import Sample
from rlhf_trainer.rewards.verifiers import expectation, right_responses
from rlhf_trainer.workers.scoring import UserCode, code_of

ROWS_AT_ONCE, SECONDS = 256, 3600.0
"""Rows of one call of the verifier, and the call's time limit."""
PLAIN = re.compile(r"-?(\d{1,3}(,\d{3})+|\d{1,15})(\.\d{1,9})?")
"""Pattern of plain numbers, which Math surely reads; rows with such answers are not checked: there may be millions."""


def find_faults(job: Job, source: Rows, table: Mapping[str, Sequence[Any]]) -> dict[int, str]:
    """Return the faults of rows by index. A collective: the first rank checks, so all ranks leave out the same rows."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    found = [dict(_faults(job, source, table)) if is_first else {}]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


def _faults(job: Job, source: Rows, table: Mapping[str, Sequence[Any]]) -> Iterator[tuple[int, str]]:
    models, teachers = job.spec.models, {each.name for each in job.spec.models.teacher_endpoints}
    for field, reader in job.spec.column_readers(source):
        if isinstance(reader, Distilling) and reader.teacher_key and models.teacher is None:
            unnamed = [each for each in enumerate(table[reader.teacher_key]) if str(each[1]) not in teachers]
            for row, value in unnamed:
                yield row, f"holds {value!r:.60} as {reader.teacher_key}, which no teacher has"
        if not isinstance(reader, Verifier) or not reader.columns:
            continue
        verifier: Any = reader.model_copy(update={"response_extract": None} if isinstance(reader, Comparing) else {})
        reward = RewardVerifier.model_construct(verifier=verifier, timeout_seconds=SECONDS)
        values = table[reader.columns[0]]
        with closing(code_of(reward, ranks=1, deadline=SECONDS, path=field)) as code:
            parts = [range(len(values))[first : first + ROWS_AT_ONCE] for first in range(0, len(values), ROWS_AT_ONCE)]
            for row, why in chain(*(_reasons(code, verifier, table, rows) for rows in parts)):
                yield row, f"holds {values[row]!r:.60} as {verifier.columns[0]}, which {why}"


def _reasons(
    code: UserCode, verifier: Verifier, table: Mapping[str, Sequence[Any]], rows: range
) -> Iterator[tuple[int, str]]:
    """Yield (row, why it is bad), by the scores of an empty response and of right ones."""
    tried = dict[int, list[Sample]]()
    for row in rows:
        try:
            tried[row] = _samples(verifier, row, {name: values[row] for name, values in table.items()})
        except (ValueError, TypeError, RecursionError) as error:
            yield row, str(error)
    scores = iter(code.scores([*chain(*tried.values())]))
    for row, samples in tried.items():
        empty, *others = [next(scores).value for _ in samples] or [0.0]
        again = (code.scores([each])[0].value for each in samples[1:])  # if none passes: each alone
        if empty == 1.0:
            yield row, "an empty response fulfils"
        elif others and not any(value in (1.0, None) for value in chain(others, again)):
            yield row, f"no right response fulfils for {verifier.name}"


def _samples(verifier: Verifier, row: int, columns: Mapping[str, Any]) -> list[Sample]:
    """Return an empty and the right responses to a row; [] for plain numbers. ValueError: see `right_responses`."""
    if isinstance(verifier, Math) and any(map(PLAIN.fullmatch, expectation(verifier, columns[verifier.answer_key]))):
        return []
    given = {name: columns[name] for name in verifier.columns}
    return [
        Sample(step=None, row=row, prompt="", response=each, finished=True, columns=given)
        for each in ("", *right_responses(verifier, columns))
    ]
