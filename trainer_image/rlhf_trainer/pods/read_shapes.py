"""Tells the operator what only a job's own pods can read: an own algorithm, and the shapes of models.

The operator runs `python -m rlhf_trainer.pods.read_shapes ASKED FILE` in a pod before the first attempt. FILE is the
pod's termination message. ASKED is the JSON of an algorithm, {"entrypoint": "module:Class", "options": {...}}, and the
answer has the fields of `rlhf_api.spec.custom_algorithm.ReadStep`, or {"problem": "a sentence"}. Or ASKED is a JSON
list of [URI, revision or null]; for each of them the list in FILE has one of

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

from rlhf_api.own_code import OwnCodeError
from rlhf_api.problems import SpecError, one_line
from rlhf_api.spec.algorithms import CUSTOM
from rlhf_api.spec.custom_algorithm import Custom, loaded, read
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
    """Answer for what the command line asks."""
    asked, file = json.loads(sys.argv[1]), Path(sys.argv[2])
    answers = step(asked) if isinstance(asked, dict) else [answer(uri, revision) for uri, revision in asked]
    file.write_text(json.dumps(answers, ensure_ascii=False), encoding="utf-8")


def step(asked: dict[str, Any]) -> dict[str, Any]:
    """What is told of an algorithm."""
    try:
        given = Custom.model_validate({"name": CUSTOM, **asked})
        return read(loaded(given)).model_dump(mode="json", by_alias=True)
    except (SpecError, OwnCodeError) as error:
        return {"problem": one_line(str(error), LONGEST_PROBLEM)}


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
