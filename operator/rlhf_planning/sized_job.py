"""Job that `rlhf size` plans: a manifest made of a model, an algorithm and a few numbers."""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from rlhf_api.files import apply
from rlhf_api.job import Job
from rlhf_api.names import API_VERSION, KIND, Role
from rlhf_api.problems import Problem, SpecError, suggestion
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_mapper.config_file import manifest_architecture
from rlhf_mapper.mapping import PLACED_WITH, DeviceMapping
from rlhf_mapper.workload import lengths_around
from rlhf_planning.named_model import NamedModel

AMOUNT = re.compile(r"(\d{1,12}(?:\.\d+)?) ?([a-z]*)")
SECONDS = {"": 1, "s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
DATA = "file:///data/train.jsonl"
"""Place of the training data in the manifest, which the user replaces."""
SAMPLES = 8
"""Responses to each prompt, if the user does not say how many."""


class Training(NamedTuple):
    """Training that a user asks about. A `mean` or `samples` of 0 is unset; a rank (`lora`) of 0 means no adapter."""

    algorithm: str
    response: int
    prompt: int
    mean: int
    samples: int
    prompts: int
    lora: int
    steps: int
    sets: Sequence[str]

    def lengths(self) -> tuple[float, ...]:
        """Return the lengths of responses in tokens; empty if no mean is known. SpecError for an impossible mean."""
        if self.mean > self.response:
            raise SpecError([Problem("--mean", f"is {self.mean}, above the limit of {self.response} (--response)")])
        return lengths_around(self.mean, float(self.response)) if self.mean else ()


def tokens_of(text: str, path: str) -> int:
    """Return a number of tokens above 0; `16k` is 16,384. Raises SpecError."""
    return round(_amount(text, path, {"": 1, "k": 1024}, "a number of tokens, such as 16k"))


def seconds_of(text: str, path: str) -> float:
    """Return the seconds of a duration above 0 such as 48h, 2min or 90. Raises SpecError."""
    return _amount(text, path, SECONDS, "a duration, such as 48h, 2min or 90s")


def _amount(text: str, path: str, units: Mapping[str, int], expected: str) -> float:
    """Return a number with a unit, at least 1 of the smallest of `units`. Raises SpecError."""
    found = AMOUNT.fullmatch(text.strip().lower())
    if (amount := float(found[1]) * units.get(found[2], 0) if found else 0.0) < 1:
        raise SpecError([Problem(path, f"is {text}, expected {expected}")])
    return amount


def document_of(model: NamedModel, training: Training) -> dict[str, Any]:
    """Return a manifest for a training of a model; every model of the job has its shape. Raises SpecError."""
    known = {name.lower(): name for name in ALGORITHMS}
    if (name := known.get(training.algorithm.lower())) is None:
        message = f"is {training.algorithm}; {suggestion(training.algorithm, ALGORITHMS)}"
        raise SpecError([Problem("--algorithm", message)])
    algorithm, place = ALGORITHMS[name], {"uri": model.uri, "shape": dict(model.shape)}
    _require_possible(model, training, generates=not algorithm.offline)
    roles = [role for role in (*algorithm.trained, *algorithm.frozen) if role not in (*PLACED_WITH, "reference")]
    adapter = {"lora": {"rank": training.lora, "alpha": 2 * training.lora}} if training.lora else {}
    models: dict[str, Any] = {role: place | (adapter if role in algorithm.trained else {}) for role in roles}
    if "reward" in algorithm.frozen and "critic" not in models:
        models["reward"] = {"verifier": {"name": "Math", "answerKey": "answer"}}
    limits = {"maxPromptTokens": training.prompt, "maxResponseTokens": training.response}
    batch = "batchSize" if algorithm.offline else "promptBatchSize"
    spec = {
        "algorithm": {"name": name},
        "models": models,
        "data": {"train": {"uri": DATA}, **limits},
        "training": {"totalSteps": training.steps, batch: training.prompts},
        **({} if algorithm.offline else {"rollout": {"samplesPerPrompt": training.samples or SAMPLES}}),
    }
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "sized"}, "spec": spec}
    (changed,) = apply(training.sets, [document])
    return dict(changed)


def _require_possible(model: NamedModel, training: Training, *, generates: bool) -> None:
    """Raise SpecError for texts longer than the model reads, and for responses where none are generated."""
    longest, most = training.prompt + training.response, model.architecture.positions
    if generates and 0 < most < longest:
        message = f"are {longest} tokens together, but {model.name} reads {most} at most (max_position_embeddings)"
        raise SpecError([Problem("--prompt and --response", f"{message}, unless its config.json scales them")])
    if training.samples and not generates:
        raise SpecError([Problem("--samples", f"is for RL only, {training.algorithm} generates no responses")])


def shapes_of(job: Job) -> dict[Role, Any]:
    """Return the architecture of each model of a job whose manifest has all shapes."""
    return {role: manifest_architecture(job, role, job, role) for role in job.models()}


def placed_document(document: Mapping[str, Any], mapping: DeviceMapping) -> dict[str, Any]:
    """Return a manifest with the pools and the parallel sizes of a mapping."""
    placed = deepcopy(dict(document))
    spec = placed["spec"]
    pools = [
        {"name": pool.name, "models": [role for role in pool.models if role not in PLACED_WITH]}
        | {"nodes": len(pool.slots_per_machine), "slotsPerNode": pool.slots_per_machine[0]}
        for pool in mapping.pools
    ]
    spec["placement"] = {"mode": "Manual", "pools": pools}
    if "reference" in mapping.sizes and mapping.sizes["reference"] != mapping.sizes["actor"]:
        spec["models"]["reference"] = {name: spec["models"]["actor"][name] for name in ("uri", "shape")}
    for role, sizes in mapping.sizes.items():
        cut = {name: getattr(sizes, name) for name in ("pipeline", "tensor", "context", "expert")}
        if role in spec["models"] and max(cut.values()) > 1:
            spec["models"][role]["parallelism"] = {name: size for name, size in cut.items() if size > 1}
    generates = mapping.sizes.get("rollout") or mapping.sizes.get("actor")
    if generates and "rollout" in spec:
        spec["rollout"]["pipelineParallel"] = generates.generation_pipeline
        spec["rollout"]["tensorParallel"] = generates.generation_tensor
    return placed
