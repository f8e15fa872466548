"""Published speeds of software like the trainer's and its generator's, which its coefficients are held against.

Steps: NeMo RL's performance summaries (github.com/NVIDIA-NeMo/RL, docs/about/performance-summary.md, v0.4, v0.5 and
v0.7), GRPO on policy in BF16; the recipes beside them say 64 prompts of OpenMathInstruct-2, 32 responses each, 4,096
tokens at most with the prompt, a KL penalty, mini-batches of 512. Megatron trains there: FSDP2 has no such table. Of
lengths only the mean response is published. Taken are prompts of 120 tokens, which is what tokens/s/GPU leave besides
the responses, and lognormal responses of which 99 of 100 are shorter than 3,968.
Training: torchtitan (docs/performance.md), FSDP2 without torch.compile; its H100 have slower memory (HBM2e) and 500 W.
Decoding: vLLM 0.21 on an H100 (yobitel InferenceBench, concurrency sweep, TPOT; the tokens of its context are a guess),
vLLM 0.23 on an A100 of 40 GB (J. Musgrave, throughput-latency sweep). That of 256 sequences is no measurement: it is
the middle of the range that issue J gives, at a context that is a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.auto_map import MappingProblem, task_of
from rlhf_mapper.coefficients import Efficiency, Software, software_for
from rlhf_mapper.hardware import GPUS, Cluster, NodeGroup
from rlhf_mapper.simulate import generation, training
from rlhf_mapper.simulate.layouts import Layouts, Numbers
from rlhf_mapper.simulate.passes import Passes
from rlhf_mapper.workload import Lengths, Work, Workload, lognormal

PROMPT, LIMIT, GROUP = 120, 3968, 32
NETWORK = 3200e9 / 8
"""Bytes/s of a DGX H100's network."""
SHAPES: Mapping[str, Architecture] = {
    "8B": Architecture(layers=32, hidden=4096, heads=32, kv_heads=8, head_size=128, ffn=14336, vocabulary=128256),
    "32B": Architecture(
        layers=64, hidden=5120, heads=64, kv_heads=8, head_size=128, ffn=25600, vocabulary=151936, norms_heads=True
    ),
}
"""Llama-3.1-8B and Qwen3-32B."""


@dataclass(frozen=True)
class Step:
    """A published step of GRPO."""

    shape: str
    gpus: int
    mean: int
    """Tokens of a response."""
    mini_batch: int
    seconds: float
    gpu: str = "h100-80g"
    gpus_per_node: int = 8


STEPS: Mapping[str, Step] = {
    "v0.4 8B, 16 H100": Step("8B", 16, 1060, 512, 97.7),
    "v0.5 8B, 16 H100": Step("8B", 16, 1019, 512, 92.8),
    "v0.4 32B, 32 H100": Step("32B", 32, 3206, 512, 393.0),
    "v0.5 32B, 32 H100": Step("32B", 32, 3251, 512, 376.0),
    "v0.7 32B, 32 H100": Step("32B", 32, 3256, 2048, 323.0),
}


def problem_of(step: Step, software: Software | None = None) -> tuple[MappingProblem, Cluster]:
    """What is to be mapped; the reward is a rule, and the reference has the actor's shape."""
    manifest: dict[str, Any] = {
        "apiVersion": "rlhf.hybridflow.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {"name": "published"},
        "spec": {
            "algorithm": {"name": "GRPO", "kl": {"coefficient": 0.01}},
            "models": {"actor": {"uri": "hf://org/model"}, "reward": {"entrypoint": "rules:score"}},
            "data": {"train": {"uri": "hf://org/data"}, "maxPromptTokens": PROMPT, "maxResponseTokens": LIMIT},
            "rollout": {"samplesPerPrompt": GROUP},
            "training": {"totalSteps": 1, "promptBatchSize": 2048 // GROUP, "miniBatchSize": step.mini_batch},
        },
    }
    job = Job.parse(manifest)
    shapes: dict[Role, Architecture] = dict.fromkeys(job.models(), SHAPES[step.shape])
    task = task_of(job, shapes, device="GPU", responses=lognormal(step.mean, LIMIT, most=LIMIT))
    nodes = NodeGroup(
        gpu=GPUS[step.gpu],
        count=step.gpus // step.gpus_per_node,
        gpus_per_node=step.gpus_per_node,
        node_bandwidth=NETWORK,
    )
    return replace(task, software=software or task.software), Cluster((nodes,))


def step_seconds(step: Step, efficiency: Efficiency) -> float:
    """Of the best mapping that there is; inf where nothing fits."""
    task, cluster = problem_of(step, replace(software_for("GPU", "BF16"), efficiency=efficiency))
    found = task.search(task.costs(cluster))
    return found[0].seconds if found else float("inf")


def _alone(*sizes: int) -> Layouts:
    return Layouts(*(np.array(float(size)) for size in sizes))


def _one(gpu: str) -> NodeGroup:
    return NodeGroup(gpu=GPUS[gpu], count=1, gpus_per_node=8, node_bandwidth=NETWORK)


def _load(prompt: float, response: float) -> Workload:
    return Workload(sequences=1, prompt=Lengths((prompt,)), response=Lengths((response,)), work={})


TRAINED: Mapping[str, tuple[str, str, int, int, float]] = {"FSDP2 8B, 8 H100": ("8B", "h100-80g", 8192, 2, 5762.0)}
"""(shape, GPU, tokens of a sequence, sequences of a GPU, tokens/s of a GPU); every second layer is recomputed."""
DECODED: Mapping[str, tuple[str, str, int, int, float]] = {
    "vLLM 8B, 1 on an H100": ("8B", "h100-80g", 1, 256, 6.48e-3),
    "vLLM 8B, 4 on an H100": ("8B", "h100-80g", 4, 256, 6.59e-3),
    "vLLM 8B, 1 on an A100 40 GB": ("8B", "a100-40g", 1, 1024, 1 / 75),
    "vLLM 8B, 256 on an H100": ("8B", "h100-80g", 256, 512, 256 / 10_000),
}
"""(shape, GPU, sequences at once, tokens that each has, seconds of a decode step)."""


def trained_seconds(name: str, efficiency: Efficiency) -> float:
    """Of a token on a GPU. Its norms are fused, as those of a generator; its matrix products are ours."""
    shape, gpu, tokens, sequences, _ = TRAINED[name]
    software = replace(software_for("GPU", "BF16"), efficiency=efficiency, layers="Megatron")
    passes, work = Passes(SHAPES[shape], _one(gpu), software), Work(trained=8.0 * sequences, updates=1)
    layouts, load, size = _alone(1, 1, 8), _load(0.0, tokens), np.array(float(sequences))
    once, again = (
        training.training_seconds(passes, replace(work, recomputes=each), load, layouts, size) for each in (False, True)
    )
    return float((once + again) / 2) / (sequences * tokens)


def decoded_seconds(name: str, efficiency: Efficiency) -> float:
    """Of a decode step: what a second token takes longer than one."""
    shape, gpu, sequences, context, _ = DECODED[name]
    passes = Passes(SHAPES[shape], _one(gpu), replace(software_for("GPU", "BF16"), efficiency=efficiency))
    work, cache = Work(generated=sequences, passes=1), np.array(60e9)

    def seconds(response: float) -> Numbers:
        return generation.generation_seconds(passes, work, _load(context, response), _alone(1, 1, 1), cache)

    return float(seconds(2.0) - seconds(1.0))
