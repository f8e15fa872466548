"""Check of the columns that verifiers read: a row is bad if an empty response is right by it, or a right one is not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from rlhf_api.job import Job
from rlhf_api.spec.data import Rows
from rlhf_api.spec.verifiers import Comparing, Math, RewardVerifier, Verifier
from rlhf_trainer.rewards.sample import Sample
from rlhf_trainer.rewards.verifiers import expectation, right_responses
from rlhf_trainer.workers.scoring import UserCode, code_of

ROWS_AT_ONCE, SECONDS = 256, 3600.0
"""Rows of one call of the verifier, and the call's time limit."""
PLAIN = re.compile(r"-?(\d{1,3}(,\d{3})+|\d{1,15})(\.\d{1,9})?")
"""Pattern of right answers that Math surely reads; their rows are not tried, as a data set may have millions."""


def find_faults(job: Job, source: Rows, table: Mapping[str, Sequence[Any]]) -> dict[int, str]:
    """Return the faults of rows by index. A collective: the first rank checks, so all ranks leave out the same rows."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    found = [dict(_faults(job, source, table)) if is_first else {}]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


def _faults(job: Job, source: Rows, table: Mapping[str, Sequence[Any]]) -> Iterator[tuple[int, str]]:
    readers = [(field, each) for field, each in job.spec.column_readers(source) if isinstance(each, Verifier)]
    for field, reader in [(field, each) for field, each in readers if each.columns]:
        verifier: Any = reader.model_copy(update={"response_extract": None} if isinstance(reader, Comparing) else {})
        reward = RewardVerifier.model_construct(verifier=verifier, timeout_seconds=SECONDS)
        code = code_of(reward, ranks=1, deadline=SECONDS, path=field)
        values = table[verifier.columns[0]]
        for first in range(0, len(values), ROWS_AT_ONCE):
            for row, why in _reasons(code, verifier, table, range(len(values))[first : first + ROWS_AT_ONCE]):
                yield row, f"holds {values[row]!r:.60} as {verifier.columns[0]}, which {why}"
        code.close()


def _reasons(
    code: UserCode, verifier: Verifier, table: Mapping[str, Sequence[Any]], rows: range
) -> Iterator[tuple[int, str]]:
    """Yield (row, why it is bad), by the scores of an empty response and of right ones."""
    samples, right = list[Sample](), dict[int, bool]()
    for row in rows:
        columns = {name: table[name][row] for name in verifier.columns}
        try:
            if isinstance(verifier, Math) and any(
                map(PLAIN.fullmatch, expectation(verifier, table[verifier.answer_key][row]))
            ):
                continue
            responses = ["", *right_responses(verifier, columns)]
        except (ValueError, TypeError, RecursionError) as error:
            yield row, str(error)
            continue
        made: dict[str, Any] = {"step": None, "row": row, "prompt": "", "finished": True, "columns": columns}
        samples += [Sample(response=each, **made) for each in responses]
    for sample, score in zip(samples, code.scores(samples), strict=True):
        if sample.response:
            right[sample.row] = right.get(sample.row) or score.value in (1.0, None)
        elif score.value == 1.0:
            yield sample.row, "an empty response fulfils"
    for sample in [each for each in samples if each.response and not right[each.row]]:  # once more, without haste
        right[sample.row] = right[sample.row] or code.scores([sample])[0].value in (1.0, None)
    yield from ((row, f"no right response fulfils for {verifier.name}") for row, holds in right.items() if not holds)
