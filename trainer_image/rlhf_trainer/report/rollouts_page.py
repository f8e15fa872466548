"""Page `rollouts.html`: responses that a run learned from, with filters."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from rlhf_planning.numbers import shortened
from rlhf_trainer.report.rollouts import Rollouts
from rlhf_trainer.report.template import rendered, script
from rlhf_trainer.run_folder.rollouts import NUMBERS

PAGE = "rollouts.html"
MAX_CHARACTERS = 2000


def render(name: str, jobs: Mapping[str, Rollouts]) -> str:
    """Return the page about the jobs of a run; its only script is ours, which shows texts as texts."""
    rows = [_row(job, row) for job, found in jobs.items() for row in found.rows]
    return rendered("rollouts.html", {"name": name, "jobs": jobs, "data": {"rows": rows}, **script("rollouts.js")})


def _row(job: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a kept response as data for the page; a number that is not finite becomes null, as JSON requires."""
    parts, columns, turns = row.get("reward_parts"), row.get("columns"), row.get("turns")
    return {
        "job": job,
        "step": row["step"],
        "row": row["row"],
        "finished": bool(row.get("finished")),
        "prompt": shortened(row["prompt"], MAX_CHARACTERS),
        "response": shortened(row["response"], MAX_CHARACTERS),
        "columns": shortened(json.dumps(columns, ensure_ascii=False), MAX_CHARACTERS) if columns else "",
        "parts": {str(name): _number(value) for name, value in parts.items()} if isinstance(parts, dict) else {},
        "turns": [_turn(each) for each in turns if isinstance(each, dict)] if isinstance(turns, list) else [],
        **{name: _number(row.get(name)) for name in NUMBERS},
    }


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn of an episode, a text of the model or of its environment, as data for the page."""
    return {
        "text": shortened(str(turn.get("text")), MAX_CHARACTERS),
        "written": bool(turn.get("written")),
        "reward": _number(turn.get("reward")),
    }


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None
