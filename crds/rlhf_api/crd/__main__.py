"""`python -m rlhf_api.crd` writes what is made from the typed spec: definition, copy in the chart, reference."""

from collections.abc import Mapping
from pathlib import Path

from rlhf_api.crd import definition, reference

ROOT = Path(__file__).resolve().parents[3]


def generated() -> Mapping[Path, str]:
    """Every generated file and what belongs in it."""
    return {
        ROOT / "crds" / "rlhfjobs.yaml": definition.text(),
        ROOT
        / "helm"
        / "rlhf-operator"
        / "files"
        / "rlhfjobs.yaml": definition.text(),  # Helm reads its own folder only
        ROOT / "docs" / "api-reference.md": reference.text(),
    }


def main() -> None:
    """Write them."""
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
