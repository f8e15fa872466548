"""The summary of a climb: what was predicted, what was measured, and by how much they differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

COMPARED = {"1.5b": "qwen2.5-1.5b-1-16k", "7b": "qwen2.5-7b-1-8-layers-16k"}
"""Case by variant of an update whose plain and fused kernels are compared, and whose memory is counted beforehand."""
MAPPER = "mapper"
"""Name, among a part's figures, of those that the mapper predicts for it."""
COUNTED = "counted-{case}.json"
"""File of the memory that `tests.real_size` counts for a case."""


class Prediction(NamedTuple):
    """Range in which a figure is expected."""

    letter: str
    path: tuple[str, ...]
    """Part and name of the figure, and names within it."""
    low: float
    high: float
    source: str


H100, H200, PLAN = "measured on an H100", "measured on an H200", "estimate"
PREDICTIONS = (
    Prediction("A", ("ceilings", "tflops"), 750, 800, H100),
    Prediction("A", ("ceilings", "copy_tb_s"), 3.0, 4.3, H100),
    Prediction("A", ("pinned memory", "taken_over_asked"), 1.0, 2.0, H100),
    Prediction("A", ("head", "ms"), 150, 200, PLAN),
    Prediction("B", ("plain", "update_seconds"), 0.56, 0.65, H100),
    Prediction("B", ("plain", "mfu"), 0.23, 0.29, H100),
    Prediction("B", ("fused", "update_seconds"), 0.33, 0.40, PLAN),
    Prediction("B", ("fused", "mfu"), 0.38, 0.46, PLAN),
    Prediction("C", ("plain", "update_seconds"), 0.67, 0.71, H100),
    Prediction("C", ("plain", "mfu"), 0.31, 0.33, H100),
    Prediction("C", ("fused", "update_seconds"), 0.51, 0.56, PLAN),
    Prediction("C", ("fused", "mfu"), 0.39, 0.44, PLAN),
    Prediction("D", ("start", "seconds"), 50, 70, H100),
    Prediction("D", ("round 2", "reshard_seconds"), 0.05, 0.1, H100),
    Prediction("D", ("round 5", "kl"), 0, 0.0003, H100),
    Prediction("D", ("round 5", "largest_gap"), 0, 0.07, H100),
    Prediction("F", ("run", "seconds"), 120, 280, PLAN),
    Prediction("F", ("jobs", "helpful-ppo", "steps"), 25, 25, "the manifest"),
    Prediction("G", ("other batches", "differ by 1"), 0, 0, "vLLM's documentation"),
    Prediction("G", ("round 3", "kl"), 0, 0.0003, PLAN),
    Prediction("H", ("start", "seconds"), 10, 40, PLAN),
    Prediction("H", ("256 sampled", "tokens_per_second"), 8_000, 19_000, PLAN),
    Prediction("I", ("start", "seconds"), 60, 120, H200),
    Prediction("I", ("second reshard", "phase_seconds"), 0.3, 0.6, H200),
    Prediction("I", ("second update", "phase_seconds"), 0.7, 1.24, H200),
    Prediction("J", ("256 sampled", "tokens_per_second"), 19_000, 25_000, H100),
    Prediction("J", ("512 sampled", "tokens_per_second"), 23_000, 42_000, H200),
    Prediction("M", ("round 5", "kl"), 0, 0.000002, H200),
)
"""Figures of earlier runs, and estimates for what has not run yet; `fused`: 1.7 and 1.3 times faster than plain."""


def summary_of(lines: Mapping[str, Mapping[str, Any]], names: Mapping[str, str], folder: Path) -> str:
    """Return the summary as text.

    lines: the last result of each step by its letter; names: of all steps; folder: where counts of memory lie.
    """
    said = [f"{'step':26}{'figure':38}{'predicted':>20}{'measured':>12}  difference"]
    if any(line.get("rehearsal") for line in lines.values()):
        said.insert(0, "a rehearsal: its figures are those of a tiny model on the CPU")
    counted = [
        Prediction(letter, ("plain", "gb", phase), peak, peak, "counted")
        for letter, line in lines.items()
        for phase, peak in _counted(line, folder).items()
    ]
    mapped = [
        Prediction(letter, (part, name), seconds, seconds, MAPPER)
        for letter, line in lines.items()
        for part, figures in line["figures"].items()
        for name, seconds in figures.get(MAPPER, {}).items()
        if seconds is not None
    ]
    for each in (*PREDICTIONS, *counted, *mapped):
        measured = _figure(lines.get(each.letter, {}), each.path)
        if measured is not None:
            said.append(_row(f"{each.letter} {names[each.letter]}", each, measured))
    for letter, line in lines.items():
        title = f"{letter} {names[letter]}"
        said += [f"{title}: without CUDA graphs, for: {line['fell_back']}"] if line.get("fell_back") else []
        said += [f"{title}: {part} FAILED: {reason}" for part, reason in line["failed"].items()]
        said += [f"{title}: {part} not tried: {reason}" for part, reason in line["skipped"].items()]
    if missing := [f"{letter} {name}" for letter, name in names.items() if letter not in lines]:
        said.append(f"without a result: {', '.join(missing)}")
    return "\n".join(said)


def _figure(line: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    found: Any = line.get("figures", {})
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) else None


def _row(title: str, each: Prediction, measured: float) -> str:
    bounds = f"{each.low:g}" if each.low == each.high else f"{each.low:g} to {each.high:g}"
    return f"{title:26}{' '.join(each.path):38}{bounds:>20}{measured:>12.5g}  {_difference(each, measured)}"


def _difference(each: Prediction, measured: float) -> str:
    """How far the figure lies outside of its range, and where the range is from."""
    nearest = min(max(measured, each.low), each.high)
    if measured == nearest:
        return f"none ({each.source})"
    share = f"{measured / nearest - 1:+.0%}" if nearest else f"{measured - nearest:+g}"
    return f"{share} ({each.source})"


def _counted(line: Mapping[str, Any], folder: Path) -> dict[str, float]:
    """Counted peaks in GB by phase; empty where nothing is counted, or counting has not ended."""
    case = line.get("figures", {}).get("plain", {}).get("case")
    try:
        rows = json.loads((folder / COUNTED.format(case=case)).read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return {phase: each["peak"] for phase, each in rows[case]["phases"].items()}
