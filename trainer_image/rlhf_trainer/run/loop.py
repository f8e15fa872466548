"""The loop around an algorithm's step: count, time, check, hand on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rlhf_trainer.telemetry import CONTROLLER, Report, Span, StepReport, merge, phase_seconds

Record = dict[str, float]


def train(
    run_step: Callable[[int], Sequence[Report]],
    *,
    first_step: int,
    total_steps: int,
    measure: Callable[[int], Mapping[str, float]],
    publish: Callable[[StepReport], None],
    after_record: Callable[[int], None],
) -> None:
    """Run the steps from `first_step` on.

    `run_step(number)` runs one and returns what every rank measured; `measure(number)` may add an evaluation to its
    record; `after_record(number)` comes when the record is published.
    """
    for number in range(first_step, total_steps + 1):
        report = timed_step(number, run_step)
        publish(replace(report, record=finite({**report.record, **measure(number)})))
        after_record(number)


def finite(record: Mapping[str, float]) -> Record:
    """The values that are finite: JSON knows no others, and `skipped_updates` counts what they led to."""
    return {name: value for name, value in record.items() if math.isfinite(value)}


def timed_step(number: int, run_step: Callable[[int], Sequence[Report]]) -> StepReport:
    """Run one step: its metrics under the names of metrics.jsonl (times in seconds), the ranks' warnings, all spans."""
    began = time.time()
    reports = run_step(number)
    seconds = time.time() - began
    spans = [span for report in reports for span in report.spans]
    record: Record = {"step": number, **merge(reports), **phase_seconds(spans, seconds)}
    if "tokens" in record:
        record["tokens_per_second"] = record.pop("tokens") / seconds
    warnings = {name: message for report in reports for name, message in report.warnings.items()}
    return StepReport(
        record=record,
        warnings=[warnings[name] for name in sorted(warnings)],
        spans=[Span(CONTROLLER, f"step {number}", 0, began, began + seconds), *spans],
    )
