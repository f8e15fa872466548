"""Reads `trace.json`, which a run writes for Chrome's trace viewers."""

from __future__ import annotations

from typing import NamedTuple

from rlhf_trainer.run_folder.attempt import from_json


class Event(NamedTuple):
    """What one rank did; times in seconds after the begin of the first step."""

    pool: str
    """Empty for the controller."""
    rank: int
    phase: str
    name: str
    step: int
    """The one that it was done for."""
    start: float
    end: float


def events(text: str) -> list[Event]:
    """The events of a file. ValueError, TypeError or LookupError if it is damaged."""
    rows = from_json(text)["traceEvents"]
    processes = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    return [
        Event(
            pool=processes[row["pid"]].partition("pool ")[2],
            rank=int(row["tid"]),
            phase=str(row["cat"]),
            name=str(row["name"]),
            step=int(row["args"]["step"]),
            start=row["ts"] / 1e6,
            end=(row["ts"] + row["dur"]) / 1e6,
        )
        for row in rows
        if row["ph"] == "X"
    ]
