"""An upgrade from the last release: values and objects stay valid, and the version is newer."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from helm.crd.definition import definition
from rlhf_operator.cluster.parse import HAD_DEFAULTS
from tests.helm import last_release
from tests.helm.rendering import CHART, KUBERNETES, NAMESPACE, RELEASE, Helm

LAST = last_release.files()
COUNTED = ("values.yaml", "values.schema.json", "files/rlhfjobs.yaml", "templates/")
NARROWER = {"maximum": -1, "maxLength": -1, "maxItems": -1, "maxProperties": -1, "minimum": 1, "minLength": 1}
"""Bound -> sign of a change that refuses what was allowed."""


def spec(document: dict[str, Any]) -> dict[str, Any]:
    """The schema of a CRD's spec."""
    schema: dict[str, Any] = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


LEFT = {field["path"]: field for field in last_release.LEFT_FIELDS}


@pytest.fixture(scope="module")
def old() -> dict[str, dict[str, Any]]:
    """The fields of the last release's spec."""
    return dict(last_release.fields(spec(last_release.definition()), "spec"))


@pytest.fixture(scope="module")
def new() -> dict[str, dict[str, Any]]:
    """The fields of this spec."""
    return dict(last_release.fields(spec(definition()), "spec"))


def version(chart: str) -> tuple[int, ...]:
    return tuple(map(int, yaml.safe_load(chart)["version"].split(".")))


def test_a_chart_that_differs_has_a_newer_version() -> None:
    before, now = version(LAST["Chart.yaml"].decode()), version((CHART / "Chart.yaml").read_text())
    here = {
        str(path.relative_to(CHART)): path.read_bytes()
        for path in CHART.rglob("*")
        if path.is_file() and str(path.relative_to(CHART)).startswith(COUNTED)
    }
    same = here == {name: content for name, content in LAST.items() if name.startswith(COUNTED)}
    assert same or now > before


@pytest.mark.parametrize(
    "values", [LAST["values.yaml"], (last_release.FOLDER / "first_values.yaml").read_bytes()], ids=["last", "first"]
)
def test_values_of_an_earlier_release_are_enough(helm: Helm, tmp_path: Path, values: bytes) -> None:
    """`helm upgrade --reuse-values` takes them in place of the new chart's own."""
    chart = tmp_path / "rlhf-operator"
    shutil.copytree(CHART, chart)
    (chart / "values.yaml").write_bytes(values)
    options = ("--namespace", NAMESPACE, "--kube-version", KUBERNETES)
    text = helm.run("template", RELEASE, chart, *options)
    assert [each for each in yaml.safe_load_all(text) if each] == helm.template()


def test_a_field_that_is_gone_is_told_in_the_readme(old: dict[str, Any], new: dict[str, Any]) -> None:
    gone = {path for path in old if path not in new and path.rpartition(".")[0].removesuffix("[]") in (*new, "spec")}
    assert gone == LEFT.keys()
    readme = (CHART / "README.md").read_text()
    words = {word.rpartition(".")[2] for field in LEFT.values() for word in (field["path"], field["now"])}
    assert not [word for word in words if f"`{word}`" not in readme]
    assert {path for path in LEFT if LEFT[path]["schema"].get("default") is not None} <= HAD_DEFAULTS <= LEFT.keys()


def test_an_object_of_the_last_release_stays_valid(old: dict[str, Any], new: dict[str, Any]) -> None:
    for path in [path for path in old if path in new]:
        before, now = old[path], new[path]
        assert now["type"] == before["type"], path
        assert set(now.get("required", ())) <= set(before.get("required", ())), path
        assert "enum" not in now or "enum" not in before or set(before["enum"]) <= set(now["enum"]), path
        assert now.get("pattern") in (before.get("pattern"), None), f"{path}: see whether each old value still matches"
        for bound, sign in NARROWER.items():
            narrows = bound in now and ((now[bound] - before.get(bound, now[bound])) * sign > 0 or bound not in before)
            assert not narrows, f"{path}: {bound}"
