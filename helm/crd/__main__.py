"""Command `python -m helm.crd`: write the CRD, docs/api-reference.md, docs/status.md and the chart's version."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from helm.crd import definition, reference, status_page

ROOT = Path(__file__).resolve().parents[2]


def generated() -> Mapping[Path, str]:
    """Return the text of every generated file."""
    chart, crd = ROOT / "helm/rlhf-operator", definition.text()
    return {
        ROOT / "crds/rlhfjobs.yaml": crd,
        chart / "files/rlhfjobs.yaml": crd,  # Helm reads its own folder only
        chart / "files/values.yaml": (chart / "values.yaml").read_text(
            encoding="utf-8"
        ),  # templates cannot read values.yaml itself
        chart / "Chart.yaml": with_version((chart / "Chart.yaml").read_text(encoding="utf-8")),
        ROOT / "docs/api-reference.md": reference.text(),
        ROOT / "docs/status.md": status_page.text(),
    }


def with_version(chart: str) -> str:
    """Return Chart.yaml with the version of pyproject.toml, for the chart and for the images that it installs."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return re.sub(r"^(version|appVersion): .*$", rf"\1: {version}", chart, flags=re.MULTILINE)


def main() -> None:
    """Write the generated files."""
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
