"""Python files beside a manifest that a job names, and the ConfigMap from which the job's pods read them."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import packages_distributions
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any, Final

from rlhf_api.checks.pod_template import CONTAINERS
from rlhf_api.contract import ENTRYPOINT
from rlhf_api.files import strings_in
from rlhf_api.own_code import package_of
from rlhf_api.problems import Problem, SpecError
from rlhf_operator import names
from rlhf_operator.overlay import merged
from rlhf_operator.snapshot import Document

FOLDER: Final = "/code"
"""Folder of the files in the pods, which is on their PYTHONPATH."""
VARIABLE: Final = "PYTHONPATH"
MAX_BYTES: Final = 1 << 20
"""Most bytes that the API server takes as the data of a ConfigMap."""


def own_files(document: Document, folders: Sequence[Path]) -> dict[str, str]:
    """Return path -> text of the Python files that a job's pods need: modules that the job names, and their imports.

    folders: where modules are searched, in this order. Installed packages are left to the image, and so is everything
    if the job sets PYTHONPATH. Raises SpecError for too many bytes, or a file that is no Python.
    """
    spec = {part: value for part, value in document["spec"].items() if part != "runtime"}
    variables = document["spec"].get("runtime", {}).get("env") or ()
    modules = {text.partition(":")[0] for _, text in strings_in(spec) if re.match(ENTRYPOINT, text)}
    if not modules or any(each["name"] == VARIABLE for each in variables):
        return {}
    finder, installed = ModuleFinder([str(folder.resolve()) for folder in folders]), packages_distributions()
    for module in sorted(modules):
        with suppress(ImportError):  # it is in the image
            if package_of(module) not in installed:
                _import(finder, module)
    files = {name: Path(each.__file__) for name, each in finder.modules.items() if each.__file__}
    found = {
        f"{name.replace('.', '/')}{'/__init__' * (file.stem == '__init__')}.py": file for name, file in files.items()
    }
    if (size := sum(file.stat().st_size for file in found.values())) > MAX_BYTES:
        told = f"its own code has {size:,} bytes, and a ConfigMap holds {MAX_BYTES:,}; put the code into the image"
        raise SpecError([Problem(f"{document['metadata']['name']}: spec", told)])
    return {path: found[path].read_text(encoding="utf-8") for path in sorted(found)}


def _import(finder: ModuleFinder, module: str) -> None:
    """Have the finder read a module and what it imports, without running them."""
    try:
        finder.import_hook(module)
    except SyntaxError as error:
        raise SpecError([Problem(f"{error.filename}:{error.lineno}", f"is no Python: {error.msg}")]) from None


def config_map(job: str, files: Mapping[str, str]) -> dict[str, Any]:
    """Return the ConfigMap with the files of a job; its name has a hash of them, so that it never changes."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": names.by_content(f"{job}-code", json.dumps(files)), "labels": {names.JOB_NAME: job}},
        "immutable": True,
        "data": {_key_of(path): text for path, text in files.items()},
    }


def _key_of(path: str) -> str:
    return path.replace("/", ".")  # no two modules get the same key


def with_files(document: Document, code: Document, files: Mapping[str, str]) -> dict[str, Any]:
    """Return a job's document whose pods have the files of a ConfigMap in FOLDER."""
    items = [{"key": _key_of(path), "path": path} for path in files]
    volume = {"name": "own-code", "configMap": {"name": code["metadata"]["name"], "items": items}}
    runtime: dict[str, Any] = {"env": [{"name": VARIABLE, "value": FOLDER}]}
    for role, containers in CONTAINERS.items():
        container = {"name": containers[0], "volumeMounts": [{"name": volume["name"], "mountPath": FOLDER}]}
        runtime[role] = {"template": {"spec": {"volumes": [volume], "containers": [container]}}}
    return dict(merged(document, {"spec": {"runtime": runtime}}))
