"""`rlhf generate`: manifest of a job that writes a model's responses to prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rlhf_api.names import API_VERSION, KIND
from rlhf_trainer.run_folder.folder import writing


def write_manifest(output: Path, *, model: str, data: str, samples: int, batch: int) -> None:
    """Write OUTPUT/generate.yaml, a manifest whose job writes `samples` responses to each prompt."""
    document: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "generate"},
        "spec": {
            "algorithm": {"name": "Generate"},
            "models": {"actor": {"uri": uri_of(model)}},
            "data": {"train": {"uri": uri_of(data)}},
            "rollout": {"samplesPerPrompt": samples},
            "training": {"totalEpochs": 1, "promptBatchSize": batch},
        },
    }
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
        (output / "generate.yaml").write_text(yaml.safe_dump(document, sort_keys=False))


def uri_of(place: str) -> str:
    """Return `place` as a URI; the path of a file or folder becomes a `file://` URI."""
    return place if "://" in place else Path(place).absolute().as_uri()
