"""Kept training responses of a job (rollouts.jsonl), and `rlhf samples`, which shows some of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rlhf_api.problems import Problem, SpecError
from rlhf_trainer.run_folder.attempt import from_json
from rlhf_trainer.run_folder.commands import job_folders

ROLLOUTS = "rollouts.jsonl"
MAX_ROWS, MAX_BYTES = 2000, 1 << 25
"""Most responses, and most bytes, that `latest_rollouts` reads from the end of the file."""
NEEDED: Mapping[str, type | tuple[type, ...]] = {
    "step": int,
    "row": int,
    "prompt": str,
    "response": str,
    "reward": (int, float),
}
NUMBERS = ("reward", "cost", "advantage", "prompt_tokens", "response_tokens", "policy_version")


def show_samples(output: Path, *, job: str | None, step: int | None, count: int, best: bool) -> None:
    """Print the kept responses with the lowest or highest rewards in a step of each job. SpecError if none was kept."""
    folders = [folder.path for folder in job_folders(output) if job in (None, folder.path.name)]
    files = [file for folder in folders if (file := folder / ROLLOUTS).is_file()]
    kept = {file.parent.name: rows for file in files if (rows := read_step_rollouts(file, step))}
    if not kept:
        why = "no rollouts were kept; see rollout.keep" if folders else f"no job {job} has begun in it"
        why = f"has no responses of step {step}" if files and step is not None else why
        raise SpecError([Problem(str(output), why)])
    for name, rows in kept.items():
        _print_samples(name, rows, count=count, best=best)


def _print_samples(name: str, rows: Sequence[Mapping[str, Any]], *, count: int, best: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    chosen = sorted(rows, key=lambda row: row["reward"], reverse=best)[:count]
    which = f"{name}, step {rows[0]['step']}: the {len(chosen)} of {len(rows)} kept responses"
    console.print(f"{which} with the {'highest' if best else 'lowest'} reward", markup=False)
    for row in chosen:
        numbers, parts = {name: row.get(name) for name in NUMBERS}, row.get("reward_parts")
        numbers |= {f"reward_part/{name}": value for name, value in parts.items()} if isinstance(parts, dict) else {}
        shown = [f"{name} {value:.4g}" for name, value in numbers.items() if isinstance(value, int | float)]
        texts = [f"row {row['row']}", *shown, "finished" if row.get("finished") else "cut off"]
        console.print(Text(f"\n{', '.join(texts)}", style="bold"))
        for text in ("prompt", "response"):
            console.print(Text.assemble((f"{text}: ", "dim"), row[text]))


def read_step_rollouts(file: Path, step: int | None) -> list[dict[str, Any]]:
    """Return the rows of a step (None: the last) in rollouts.jsonl; if the step ran twice, the later rows."""
    found: dict[int, dict[str, Any]] = {}
    chosen = -1 if step is None else step
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            row = parse_row(line)
            if step is None and row.get("step", -1) > chosen:
                chosen, found = row["step"], {}
            if row.get("step") == chosen:
                found[row["row"]] = row
    return [found[row] for row in sorted(found)]


def latest_rollouts(file: Path) -> list[dict[str, Any]]:
    """Return the rows in the last MAX_BYTES of rollouts.jsonl, at most MAX_ROWS; none if there is no such file."""
    if not file.is_file():
        return []
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - MAX_BYTES))
        return list(filter(None, map(parse_row, lines)))[-MAX_ROWS:]


def parse_row(line: str | bytes) -> dict[str, Any]:
    """Return the kept response in a line of rollouts.jsonl; empty for a line that is damaged or still being written."""
    try:
        row = dict(from_json(line))
    except (ValueError, TypeError):
        return {}
    return row if all(isinstance(row.get(name), kind) for name, kind in NEEDED.items()) else {}
