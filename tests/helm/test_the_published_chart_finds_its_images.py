"""The chart that the workflow publishes names images that it pushes; its steps run here, without GitHub."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.helm.rendering import CHART, KUBERNETES, RELEASE, Helm, the
from tests.helm.test_the_images_fit_together import PROJECT
from tests.repo.tree import ROOT

WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text())
OWNER = "team"


def pushed() -> set[str]:
    """Names of the images that the workflow pushes for a tag of this version."""
    job = WORKFLOW["jobs"]["images"]
    (build,) = (step["with"] for step in job["steps"] if "build-push-action" in step.get("uses", ""))
    names = set()
    for image in job["strategy"]["matrix"]["include"]:
        name = build["tags"].replace("${{ github.repository_owner }}", OWNER)
        for key in ("name", "suffix"):
            name = name.replace(f"${{{{ matrix.{key} }}}}", image[key])
        names.add(name.replace("${{ steps.version.outputs.version }}", PROJECT["version"]))
    return names


def published(helm: Helm, tree: Path) -> Path:
    """The package of the chart that the workflow's step makes in a tree; helm's other commands are left out."""
    shutil.copytree(CHART, tree / CHART.relative_to(ROOT))
    programs = tree / "programs"
    programs.mkdir()
    (programs / "helm").write_text(f'#!/bin/sh\n[ "$1" = package ] && exec {helm.program} "$@"\ncat > /dev/null\n')
    (programs / "helm").chmod(0o755)
    (step,) = (each for each in WORKFLOW["jobs"]["chart"]["steps"] if "helm package" in each.get("run", ""))
    given = {"OWNER": OWNER, "TOKEN": "", "GITHUB_ACTOR": OWNER, "GITHUB_REF_NAME": f"v{PROJECT['version']}"}
    environment = {**os.environ, **given, "PATH": f"{programs}:{os.environ['PATH']}"}
    command, nothing = ["bash", "-e", "-o", "pipefail", "-c", step["run"]], subprocess.DEVNULL
    subprocess.run(command, cwd=tree, env=environment, stdin=nothing, check=True)
    (package,) = tree.glob("*.tgz")
    return package


def test_it_installs_what_was_pushed(helm: Helm, tmp_path: Path) -> None:
    package = published(helm, tmp_path)
    made = list(yaml.safe_load_all(helm.run("template", RELEASE, package, "--kube-version", KUBERNETES)))
    (container,) = the(made, "Deployment")["spec"]["template"]["spec"]["containers"]
    settings = yaml.safe_load(the(made, "ConfigMap", RELEASE)["data"]["config.yaml"])
    assert {container["image"], settings["trainerImage"]} <= pushed()
    assert settings["trainerImage"] + "-cpu" in pushed()


def test_a_mirror_has_both_images(helm: Helm, tmp_path: Path) -> None:
    package = published(helm, tmp_path)
    mirror = ("--set", "image.registry=mirror", "--kube-version", KUBERNETES)
    made = list(yaml.safe_load_all(helm.run("template", RELEASE, package, *mirror)))
    (container,) = the(made, "Deployment")["spec"]["template"]["spec"]["containers"]
    settings = yaml.safe_load(the(made, "ConfigMap", RELEASE)["data"]["config.yaml"])
    version = PROJECT["version"]
    assert container["image"] == f"mirror/rlhf-operator:{version}"
    assert settings["trainerImage"] == f"mirror/rlhf-trainer:{version}"
    values = [helm.run("show", "values", package), (tmp_path / "helm/rlhf-operator/files/values.yaml").read_text()]
    assert values[0].strip() == values[1].strip(), "values that an upgrade finds missing are those of this package"


def test_the_charts_own_names_are_those_without_the_registry(helm: Helm) -> None:
    made = helm.template()
    (container,) = the(made, "Deployment")["spec"]["template"]["spec"]["containers"]
    settings = yaml.safe_load(the(made, "ConfigMap", RELEASE)["data"]["config.yaml"])
    assert {container["image"], settings["trainerImage"]} <= {name.partition(f"/{OWNER}/")[2] for name in pushed()}


def test_every_pushed_image_has_a_list_of_what_is_in_it() -> None:
    (build,) = (step for step in WORKFLOW["jobs"]["images"]["steps"] if "build-push-action" in step.get("uses", ""))
    assert build["with"]["sbom"] is True
    files = {image["file"] for image in WORKFLOW["jobs"]["images"]["strategy"]["matrix"]["include"]}
    assert all("sbom.cdx.json" in (ROOT / file).read_text() for file in files)
