"""The chart, and helm to render it."""

import json
import pickle
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.processes import FailedError, output_of
from tests.repo.tree import ROOT

CHART = ROOT / "helm" / "rlhf-operator"
RELEASE, NAMESPACE = "rlhf-operator", "rlhf-system"
KUBERNETES = "1.36.1"
"""Ours is built without a stamp and would believe in Kubernetes 1.20."""

Manifest = dict[str, Any]
Values = Mapping[str, Any]


class KeysOnce(yaml.CSafeLoader):
    """Refuses a key that is given twice, of which the API server would take one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"twice the same key among {keys}"
        return super().construct_mapping(node, deep)


@cache
def pickled(text: str) -> bytes:
    """A document of helm's output; what the chart renders differs in few of them, and the CRD's takes long to read."""
    return pickle.dumps(yaml.load(text, KeysOnce))


class Helm:
    """A helm that keeps nothing in the home and knows no cluster."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program = program
        self._environment = {f"HELM_{kind}_HOME": str(folder / kind) for kind in ("CACHE", "CONFIG", "DATA")}
        self._environment["KUBECONFIG"] = str(folder / "none")
        self._rendered: dict[str, list[bytes]] = {}

    def run(self, *arguments: object, values: Values | None = None) -> str:
        """What helm prints; FailedError with its complaint."""
        given = ["--values", "-"] if values else []
        text = json.dumps(values) if values else None
        return output_of(self.program, *arguments, *given, text=text, environment=self._environment)

    def lint(self, values: Values | None = None) -> str:
        """Have the chart checked; warnings are errors."""
        return self.run("lint", "--strict", "--kube-version", KUBERNETES, CHART, values=values)

    def template(self, values: Values | None = None) -> list[Manifest]:
        """What the chart makes of some values; of the same values helm is asked once."""
        key = json.dumps(values)
        if key not in self._rendered:
            text = self.run(
                "template", RELEASE, CHART, "--namespace", NAMESPACE, "--kube-version", KUBERNETES, values=values
            )
            self._rendered[key] = [pickled(document) for document in re.split("^---\n", text, flags=re.MULTILINE)]
        return [document for each in self._rendered[key] if (document := pickle.loads(each))]

    def complaint(self, values: Values) -> str:
        """Why the chart does not take some values."""
        try:
            self.template(values)
        except FailedError as error:
            return str(error)
        raise AssertionError(f"the chart takes {values}")


def the(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The only object of a kind, or the one of that name."""
    (found,) = [each for each in manifests if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    return found
