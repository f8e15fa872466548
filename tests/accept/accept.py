"""The golden path through every part of the product: prints one JSON, a row a part; exits 1 if a part falls short."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from check_demo import check, table

ROOT = Path(__file__).resolve().parents[2]
RLHF = Path(sys.executable).with_name("rlhf")
EXAMPLE = "examples/01-helpful-ppo.yaml"


class FellShortError(Exception):
    """A part ran and did not do what it must; `measured` is its row all the same."""

    def __init__(self, message: str, measured: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.measured = dict(measured)


def run(folder: Path) -> dict[str, Any]:
    """`rlhf run` on this machine: its summary.json."""
    output = folder / "run"
    command = [str(RLHF), "run", EXAMPLE, "--output", str(output)]
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    if code:
        raise FellShortError(f"rlhf run exits with {code}", {"exit_code": code})
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    rows = check(summary)
    print(table(rows), file=sys.stderr)
    missed = [row.figure for row in rows if not row.good]
    if missed:
        raise FellShortError(f"missed: {', '.join(missed)}", summary)
    return summary


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {"run": run}
"""A part's row, by name; each gets a folder that is deleted afterwards and raises FellShortError."""


def main() -> int:
    """Run the parts in order; a part that falls short does not stop the others."""
    row: dict[str, Any] = {}
    code = 0
    with tempfile.TemporaryDirectory(prefix="rlhf-accept-") as name:
        for part, measure in PARTS.items():
            print(f"== {part}", file=sys.stderr)
            try:
                row[part] = measure(Path(name))
            except FellShortError as error:
                print(f"error: {part}: {error}", file=sys.stderr)
                row[part], code = error.measured, 1
    print(json.dumps(row, indent=2))
    return code


if __name__ == "__main__":
    sys.exit(main())
