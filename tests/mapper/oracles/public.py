"""Published and own measurements of training, scoring, decoding and whole steps, which predictions are held against.

`points.json` has them with their sources. A step's mean response is published, its distribution is not: lognormal
responses are taken of which 99 of 100 are shorter than the limit. Peers trained with Megatron or FSDP; each point is
predicted as this project's plan for the job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.auto_map import MappingProblem, mapping_of, task_of
from rlhf_mapper.coefficients import Efficiency, Software, software_for
from rlhf_mapper.hardware import GPUS, Cluster, NodeGroup
from rlhf_mapper.mapping import DeviceMapping, Phase
from rlhf_mapper.simulate import generation, training
from rlhf_mapper.simulate.layouts import Layouts
from rlhf_mapper.simulate.passes import Passes
from rlhf_mapper.workload import Lengths, Work, Workload, lognormal

POINTS: Mapping[str, Any] = json.loads(Path(__file__).with_name("points.json").read_text())
GPU_NAMES = {
    "H100": "h100-80g",
    "H200": "h200-141g",
    "H20": "h20-96g",
    "GB200": "gb200-186g",
    "A100-40G": "a100-40g",
}
PROMPT = 120
"""Tokens of a prompt where none are published: what NeMo RL's tokens/s leave beside the responses."""
Kind = Literal["sync", "async", "experts", "training", "scoring", "decode"]


@dataclass(frozen=True)
class Point:
    """Measured seconds, and how they are predicted."""

    name: str
    source: str
    """Points of one source share software and machines: they are left out of a fit together."""
    kind: Kind
    seconds: float
    predict: Callable[[Software], float]


def shape_of(point: Mapping[str, Any]) -> Architecture:
    """The point's model."""
    if isinstance(point["shape"], str):  # Qwen3-30B-A3B
        experts: dict[str, Any] = {"ffn": 768, "experts": 128, "experts_per_token": 8}
        shape: dict[str, Any] = {
            "layers": 48,
            "hidden": 2048,
            "heads": 32,
            "kv_heads": 4,
            "head_size": 128,
            "vocabulary": 151936,
        }
        return Architecture(**shape, **experts, norms_heads=True)
    shape = {name: value for name, value in point["shape"].items() if name != "tied"}
    return Architecture(**shape, tied=bool(point["shape"]["tied"]), norms_heads=point["model"].startswith("qwen3"))


def source_of(point: Mapping[str, Any]) -> str:
    return str(point["id"].split("-")[0])


def nodes_of(gpu: str, gpus: int) -> NodeGroup:
    per_node = 4 if gpu == "GB200" else min(gpus, 8)
    return NodeGroup(gpu=GPUS[GPU_NAMES[gpu]], count=gpus // per_node, gpus_per_node=per_node)


def software_of(efficiency: Efficiency, layers: Literal["Plain", "Fused"] = "Fused") -> Software:
    return replace(software_for("GPU", "BF16", kernels=layers), efficiency=efficiency)


def problem_of(point: Mapping[str, Any], software: Software | None = None) -> tuple[MappingProblem, Cluster]:
    """What is to be mapped for a step of GRPO; the reward is a rule, and the reference has the actor's shape."""
    sequences, samples = point["sequences"], point["samples_per_prompt"]
    prompt = PROMPT if "max_prompt_tokens" not in point else 300
    limit = point.get("max_response_tokens") or point["max_total_tokens"] - point.get("max_prompt_tokens", PROMPT)
    is_async = not point["mode"].startswith("sync")
    mini = point.get("mini_batch_sequences") or sequences // point.get("updates", 4)
    actor: dict[str, Any] = {"uri": "hf://org/model"}
    if "recomputed" in point["trainer"]:  # 20 of 28 blocks
        actor["gradientCheckpointing"] = True
    manifest: dict[str, Any] = {
        "apiVersion": "rlhf.hybridflow.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {"name": "published"},
        "spec": {
            "algorithm": {
                "name": "GRPO",
                "kl": {"coefficient": 0.01 if "kl" in point and point["kl"] != "none" else 0},
            },
            "models": {"actor": actor, "reward": {"entrypoint": "rules:score"}},
            "data": {"train": {"uri": "hf://org/data"}, "maxPromptTokens": prompt, "maxResponseTokens": limit},
            "rollout": {"samplesPerPrompt": samples, **({"maxStaleness": 1} if is_async else {})},
            "training": {"totalSteps": 1, "promptBatchSize": sequences // samples, "miniBatchSize": mini},
        },
    }
    job = Job.parse(manifest)
    shapes: dict[Role, Architecture] = dict.fromkeys(job.models(), shape_of(point))
    mean = point["mean_response_tokens"]
    task = task_of(job, shapes, device="GPU", responses=lognormal(mean, limit, most=limit))
    return replace(task, software=software or task.software), Cluster((nodes_of(point["gpu"], point["gpus"]),))


def mapped_step(point: Mapping[str, Any], software: Software | None = None) -> DeviceMapping | None:
    """The plan of a published step."""
    return mapping_of(*problem_of(point, software))


def step_seconds(point: Mapping[str, Any], phase: Phase | None, software: Software) -> float:
    """Predicted seconds of the step, or of one phase; inf where nothing fits."""
    mapping = mapped_step(point, software)
    if mapping is None or mapping.prediction is None:
        return float("inf")
    return float(mapping.prediction.phases[phase]) if phase else mapping.prediction.step_seconds


def alone(*sizes: int) -> Layouts:
    return Layouts(*(np.array(float(size)) for size in sizes))


def load_of(prompt: float, response: float) -> Workload:
    return Workload(sequences=1, prompt=Lengths((prompt,)), response=Lengths((response,)), work={})


def pass_seconds(point: Mapping[str, Any], software: Software) -> float:
    """Predicted seconds of an update, or of a scoring pass, of a point that only trains or scores."""
    software = replace(software, layers="Plain")  # none of these points has fused norms and MLPs
    model, gpus, nodes = shape_of(point), point["gpus"], nodes_of(point["gpu"], point["gpus"])
    if "HBM2e" in point["source"]:  # with NVLink, but slower memory and 500 W: the figures of the PCIe card
        nodes = replace(nodes, gpu=GPUS["h100-pcie-80g"], link_bandwidth=nodes.gpu.link_bandwidth)
    passes, size = Passes(model, nodes, software), float(point["sequences_per_gpu"])
    layouts, load = alone(1, 1, gpus), load_of(0.0, point["tokens_of_a_sequence"])
    micro = np.array(float(point.get("micro_batch_sequences", size)))
    if point["kind"] == "scoring only":
        return float(training.inference_seconds(passes, Work(read=size * gpus), load, layouts, micro))
    share = 0.005 if "LoRA" in point["what"] else 1.0
    work = Work(trained=size * gpus, updates=1, recomputes=True, trained_share=share)
    again = float(training.training_seconds(passes, work, load, layouts, micro))
    if "second" not in point["activations"]:
        return again
    once = float(training.training_seconds(passes, replace(work, recomputes=False), load, layouts, micro))
    return (once + again) / 2


def decode_seconds(point: Mapping[str, Any], software: Software) -> float:
    """Predicted seconds of a decode step on one GPU."""
    passes = Passes(shape_of(point), nodes_of(point["gpu"], 1), software)
    sequences = np.array(float(point["sequences"]))
    return float(generation.decode_step(passes, alone(1, 1, 1), sequences, point["context"]))


def serving_seconds(row: Mapping[str, Any], software: Software) -> float:
    """Predicted seconds between two tokens of Qwen3-32B under continuous load, with the prefills of others."""
    step = next(each for each in POINTS["points"] if each["model"] == "qwen3-32b")
    passes, generator = Passes(shape_of(step), nodes_of("H100", 8), software), alone(1, row["tp"], 1)
    load, concurrent = load_of(row["prompt"], row["response"]), np.array(float(row["concurrent"]))
    context = row["prompt"] + row["response"] / 2
    prefill = float(generation.prefill_seconds(passes, load, generator, np.array(1.0)))
    decode = float(generation.decode_step(passes, generator, concurrent, context))
    return float(decode + row["concurrent"] / row["response"] * prefill)


def usable_steps() -> Iterator[Mapping[str, Any]]:
    """Steps whose settings are published well enough to be predicted."""
    for point in POINTS["points"]:
        if point["kind"] == "step" and point["usable"] == 3:
            yield point


def step_kind(point: Mapping[str, Any]) -> Kind:
    if isinstance(point["shape"], str):
        return "experts"
    return "sync" if point["mode"].startswith("sync") else "async"


PUBLISHED_PHASES: Mapping[Phase, str] = {"generation": "generation", "scoring": "old_log_prob", "update": "update"}


def phase_points() -> list[Point]:
    """Phases, passes and decode steps, which a fit uses."""
    found = [
        Point(
            f"{step['id']} {phase}",
            source_of(step),
            step_kind(step),
            step["phases"][name],
            partial(step_seconds, step, phase),
        )
        for step in usable_steps()
        for phase, name in PUBLISHED_PHASES.items()
        if name in step.get("phases", {})
    ]
    for point in POINTS["points"]:
        if point["kind"] != "step":
            kind: Kind = "scoring" if point["kind"] == "scoring only" else "training"
            found.append(Point(point["id"], source_of(point), kind, point["seconds"], partial(pass_seconds, point)))
    steps = [
        Point(point["id"], source_of(point), "decode", point["seconds"], partial(decode_seconds, point))
        for point in POINTS["decode"]
    ]
    return [*found, *steps, *serving_points(POINTS["serving"]["rows"])]


def serving_points(rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Rows of vLLM under load, of one source."""
    return [
        Point(
            f"serving t {row['tp']}, {row['prompt']}+{row['response']}, {row['concurrent']} at once",
            "aisimulate",
            "decode",
            row["tpot_ms"] / 1000,
            partial(serving_seconds, row),
        )
        for row in rows
    ]


def step_points() -> list[Point]:
    """Whole steps."""
    return [
        Point(step["id"], source_of(step), step_kind(step), step["step_seconds"], partial(step_seconds, step, None))
        for step in usable_steps()
    ]
