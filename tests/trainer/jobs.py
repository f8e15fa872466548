"""Small jobs for tests."""

from pathlib import Path
from typing import Any

import yaml

from rlhf_api.files import load
from rlhf_api.job import Job


def job(folder: Path, name: str, spec: dict[str, Any]) -> Job:
    """A job read from a manifest, as a user's is."""
    document = {
        "apiVersion": "rlhf.hybridflow.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {"name": name},
        "spec": spec,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return load(path)[0]
