"""The loop around an algorithm's step: count, time, check, hand on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from rlhf_trainer.telemetry import Report, merge, phase_seconds

Record = dict[str, float]


def train(
    run_step: Callable[[int], Sequence[Report]],
    *,
    total_steps: int,
    after_step: Callable[[int], Mapping[str, float]],
    publish: Callable[[Record, Sequence[str]], None],
) -> None:
    """Run all steps.

    `run_step(number)` runs one and returns what every rank measured; `after_step(number)` may add an evaluation to its
    record.
    """
    for number in range(1, total_steps + 1):
        record, warnings = timed_record(number, run_step)
        record.update(after_step(number))
        publish(finite(record), warnings)


def finite(record: Mapping[str, float]) -> Record:
    """The values that are finite: JSON knows no others, and `skipped_updates` counts what they led to."""
    return {name: value for name, value in record.items() if math.isfinite(value)}


def timed_record(number: int, run_step: Callable[[int], Sequence[Report]]) -> tuple[Record, list[str]]:
    """Run one step: its metrics under the names of metrics.jsonl (times in seconds), and the ranks' warnings."""
    began = time.time()
    reports = run_step(number)
    seconds = time.time() - began
    record: Record = {"step": number, **merge(reports)}
    record.update(phase_seconds([span for report in reports for span in report.spans], seconds))
    if "tokens" in record:
        record["tokens_per_second"] = record.pop("tokens") / seconds
    warnings = {name: message for report in reports for name, message in report.warnings.items()}
    return record, [warnings[name] for name in sorted(warnings)]
