"""`python -m helm.dashboards` writes the dashboards into the chart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from helm.dashboards.fleet import FLEET
from helm.dashboards.job import JOB

FOLDER = Path(__file__).resolve().parents[1] / "rlhf-operator" / "files" / "dashboards"


def generated() -> Mapping[Path, str]:
    """Every file and what belongs in it."""
    dashboards = {"job": JOB, "fleet": FLEET}
    return {FOLDER / f"{name}.json": json.dumps(each.document(), indent=2) + "\n" for name, each in dashboards.items()}


def main() -> None:
    """Write them."""
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
