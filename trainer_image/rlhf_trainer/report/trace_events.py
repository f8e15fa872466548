"""Reader of `trace.json`, the file of a run for Chrome's trace viewers."""

from __future__ import annotations

from typing import NamedTuple

from rlhf_trainer.run_folder.attempt import from_json


class Event(NamedTuple):
    """Event of one rank or of the controller; times in seconds after the begin of the first step."""

    pool: str
    """Name of the rank's pool; empty for the controller."""
    rank: int
    phase: str
    name: str
    step: int
    """Step for which the rank did the event's work."""
    start: float
    end: float


def events(text: str) -> list[Event]:
    """Return the events of a trace.json. ValueError, TypeError or LookupError if the file is damaged."""
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
