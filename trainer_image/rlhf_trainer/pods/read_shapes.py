"""Reads custom algorithms and shapes of models in a pod of the job, for the operator, which cannot read them itself.

The operator runs `python -m rlhf_trainer.pods.read_shapes REQUEST FILE` in a pod before the first attempt. FILE is the
pod's termination message. REQUEST is an algorithm as JSON, {"entrypoint": "module:Class", "options": {...}}, and the
answer has the fields of `rlhf_api.spec.custom_algorithm.AlgorithmFacts`, or {"problem": "a sentence"}. Or REQUEST is a
JSON list of [URI, revision or null]; for each of them the list in FILE has one of

    {"shape": {...}}                                the numbers of its config.json, as `models.<role>.shape` has them
    {"problem": "a sentence", "weightBytes": 123}   why it has no shape; bytes of its weights, if they are local files

The program reads no weight and needs no torch.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_api.own_code import OwnCodeError
from rlhf_api.problems import SpecError, one_line
from rlhf_api.spec.algorithms import CUSTOM
from rlhf_api.spec.custom_algorithm import Custom, algorithm_facts, load_algorithm
from rlhf_mapper.config_file import ModelConfigError, shape_in
from rlhf_trainer.errors import TrainerError
from rlhf_trainer.hub import HUB
from rlhf_trainer.run.shapes import CONFIG, config_file
from rlhf_trainer.run_folder.folder import model_folder

OUTPUT = Path("/")
"""Placeholder for the run folder, in which `job://` URIs are looked up; no model for this program has such a URI."""
MAX_PROBLEM_BYTES = 300
"""Maximum bytes of a problem's text; the kubelet keeps 4,096 bytes of a termination message."""
WEIGHTS = "model*.safetensors"


def main() -> None:
    """Answer the request in the first argument; write the answers as JSON to the file named by the second argument."""
    request, file = json.loads(sys.argv[1]), Path(sys.argv[2])
    answers = step(request) if isinstance(request, dict) else [answer(uri, revision) for uri, revision in request]
    file.write_text(json.dumps(answers, ensure_ascii=False), encoding="utf-8")


def step(request: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a custom algorithm's AlgorithmFacts, or {"problem": sentence} if it cannot be read."""
    try:
        given = Custom.model_validate({"name": CUSTOM, **request})
        return algorithm_facts(load_algorithm(given)).model_dump(mode="json", by_alias=True)
    except (SpecError, OwnCodeError) as error:
        return {"problem": one_line(str(error), MAX_PROBLEM_BYTES)}


def answer(uri: str, revision: str | None) -> dict[str, Any]:
    """Return the shape of one model, or the problem and the bytes of its weights."""
    try:
        shape = shape_in(config_file(uri, revision, OUTPUT).read_text(encoding="utf-8"))
    except TrainerError as error:
        problem = str(error).removeprefix(f"{uri}: ")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{CONFIG} cannot be read: {error}"
    except ModelConfigError as error:
        problem = f"{CONFIG} {error}"
    else:
        return {"shape": shape.model_dump(mode="json", by_alias=True, exclude_none=True)}
    size = 0
    with suppress(TrainerError, OSError):
        if not uri.startswith(HUB):
            size = sum(file.stat().st_size for file in Path(model_folder(uri, OUTPUT)).glob(WEIGHTS))
    return {"problem": one_line(problem, MAX_PROBLEM_BYTES), **({"weightBytes": size} if size else {})}


if __name__ == "__main__":
    main()
