"""Tells the operator the shapes of models that only a job's own pods can read.

`python -m rlhf_trainer.read_shapes MODELS FILE`, in a pod that the operator makes before the first attempt: MODELS is a
JSON list of [URI, revision or null]. For each of them the JSON list in FILE, the pod's termination message, has one of

    {"shape": {...}}                                the numbers of its config.json, as `models.<role>.shape` has them
    {"problem": "a sentence", "weightBytes": 123}   why there are none; bytes of its weights, where they are there

No weight is read, and no torch needed.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_api.problems import one_line
from rlhf_mapper.config_file import ConfigError, shape_in
from rlhf_trainer.errors import TrainerError
from rlhf_trainer.hub import HUB
from rlhf_trainer.run.shapes import CONFIG, config_file
from rlhf_trainer.run_folder.folder import model_folder

OUTPUT = Path("/")
"""No model is the output of this run."""
LONGEST_PROBLEM = 300
"""Bytes: the kubelet keeps 4,096 bytes of a termination message."""
WEIGHTS = "model*.safetensors"


def main() -> None:
    """Answer for all models of the command line."""
    models, file = json.loads(sys.argv[1]), Path(sys.argv[2])
    answers = [answer(uri, revision) for uri, revision in models]
    file.write_text(json.dumps(answers, ensure_ascii=False), encoding="utf-8")


def answer(uri: str, revision: str | None) -> dict[str, Any]:
    """What is told of one model."""
    try:
        shape = shape_in(config_file(uri, revision, OUTPUT).read_text(encoding="utf-8"))
    except TrainerError as error:
        problem = str(error).removeprefix(f"{uri}: ")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{CONFIG} cannot be read: {error}"
    except ConfigError as error:
        problem = f"{CONFIG} {error}"
    else:
        return {"shape": shape.model_dump(mode="json", by_alias=True, exclude_none=True)}
    size = _bytes_of_weights(uri)
    return {"problem": one_line(problem, LONGEST_PROBLEM), **({"weightBytes": size} if size else {})}


def _bytes_of_weights(uri: str) -> int:
    """Of a model in a folder; 0 where none are seen."""
    with suppress(TrainerError, OSError):
        if not uri.startswith(HUB):
            return sum(file.stat().st_size for file in Path(model_folder(uri, OUTPUT)).glob(WEIGHTS))
    return 0


if __name__ == "__main__":
    main()
