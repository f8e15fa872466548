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
    named = {text.partition(":")[0] for _, text in strings_in(spec) if re.match(ENTRYPOINT, text)}
    if not named or any(each["name"] == VARIABLE for each in variables):
        return {}
    finder, installed = ModuleFinder([str(folder.resolve()) for folder in folders]), packages_distributions()
    modules = sorted(name for name in named if package_of(name) not in installed)
    for module in modules:
        with suppress(ImportError, SyntaxError):  # it is in the image, or told below
            finder.import_hook(module)
    unread = {*modules, *finder.badmodules} - finder.modules.keys()
    files = [folder / f"{name.replace('.', '/')}.py" for name in unread for folder in folders]
    if wrong := [str(file) for file in files if file.is_file()]:
        raise SpecError([Problem(file, "is no Python that can be read") for file in wrong])
    found = dict[str, Path]()
    for name, each in finder.modules.items():
        if file := getattr(each, "__file__", None):
            is_package = Path(file).stem == "__init__"
            found[f"{name.replace('.', '/')}{'/__init__' * is_package}.py"] = Path(file)
    if (size := sum(file.stat().st_size for file in found.values())) > MAX_BYTES:
        told = f"its own code has {size:,} bytes, and a ConfigMap holds {MAX_BYTES:,}; put the code into the image"
        raise SpecError([Problem(f"{document['metadata']['name']}: spec", told)])
    return {path: found[path].read_text(encoding="utf-8") for path in sorted(found)}


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
