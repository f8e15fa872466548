"""Defects of plans, before and now: `python benchmarks/mapper.py defects`. All seconds are predictions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rlhf_api.job import Job
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.auto_map import MappingProblem, auto_map, mapping_of, predict, task_of
from rlhf_mapper.coefficients import TRAINER, Correction, software_for
from rlhf_mapper.hardware import GPUS, Cluster, NodeGroup
from rlhf_mapper.mapping import DeviceMapping, Infeasible
from rlhf_mapper.simulate import memory
from rlhf_mapper.workload import lognormal
from tests.mapper.oracles import public, testbed
from tests.mapper.planned_jobs import cluster_of, drawn, job_of, shapes_of

BEFORE_ON = "2026-11-27"
BEFORE: Mapping[str, str] = {
    "jobs slower with more memory, of 60": "10 of 130 other jobs",
    "8B on 1 H100": "refused",
    "32B on 8 H100": "refused",
    "8B GRPO, responses unknown": "all at their limit",
    "8B GRPO, prompts known": "no option; 41.9 instead of 23.1 s for another job",
    "reserve of an H100, GB": "11",
    "reserve of an A10G, GB": "1.5",
    "16,384 GPUs of 8 types, 5 models": "6.7 s",
    "bf16 on T4": "feasible",
    "10,000 tokens for a model of 8,192": "feasible",
    "streaming, searched": "predicted after the search",
}
JOBS = 60
EIGHT = ("h100-80g", "a100-80g", "h200-141g", "b200-180g", "l40s-48g", "a100-40g", "h20-96g", "mi300x-192g")
SHAPES = {
    size: next(public.shape_of(each) for each in public.POINTS["points"] if each["model"] == name)
    for size, name in (("8B", "llama3.1-8b"), ("32B", "qwen3-32b"))
}


def grpo(tokens: int = 4096) -> Job:
    """GRPO of 64 prompts with 8 responses each."""
    data = {"maxPromptTokens": 1024, "maxResponseTokens": tokens}
    return job_of("GRPO", training={"promptBatchSize": 64}, rollout={"samplesPerPrompt": 8}, data=data)


def said(found: DeviceMapping | Infeasible) -> str:
    """Seconds, and host memory where some is used; or why not."""
    if isinstance(found, Infeasible):
        return found.reason
    assert found.prediction
    held = max(found.prediction.host_memory.values())
    return f"{found.prediction.step_seconds:.1f} s" + f", {held / 1e9:.0f} GB of host memory a GPU" * (held > 0)


def planned(shape: Architecture, gpus: int, **known: Any) -> str:
    """GRPO on so many H100 of one node."""
    job = grpo()
    return said(auto_map(job, cluster_of(("h100-80g", 1, gpus)), shapes_of(job, shape), device="GPU", **known))


def slower_with_memory() -> str:
    """Count jobs that a quarter more memory makes slower."""

    def seconds(seed: int, factor: float) -> float:
        job, cluster, shapes = drawn(seed)
        nodes = replace(cluster.groups[0], count=1, gpus_per_node=4)
        nodes = replace(nodes, gpu=replace(nodes.gpu, memory=factor * nodes.gpu.memory))
        task = task_of(job, shapes, device="GPU")
        found = task.search(task.costs(Cluster((nodes,))))
        return found[0].seconds if found else float("inf")

    return str(sum(seconds(seed, 1.25) > seconds(seed, 1.0) * (1 + 1e-9) for seed in range(JOBS)))


def reserve(gpu: str) -> str:
    """Bytes of a GPU in a pool of 8 that generates, which nothing else may fill."""
    whole = GPUS[gpu].memory
    return f"{(whole - float(memory.usable(TRAINER, whole, 8, generates=True))) / 1e9:.1f}"


def of_eight_types() -> str:
    """CPU seconds of a search over all groups, and over each alone."""
    batch = 65_536
    base = testbed.costs_of("70B", 128, "SafeRLHF", layout=False)
    work = testbed.work_of("SafeRLHF", batch)
    load = replace(base.settings[0].load, sequences=batch, work=work, pool_divides=(batch // 8,))
    requests = {role: replace(each, work=work[role]) for role, each in base.requests.items()}
    software = software_for("GPU", "BF16")
    problem = MappingProblem(requests=requests, load=load, software=software, correction=Correction())
    problem.simulated.clear()  # what an equal problem left would not be measured
    cluster = Cluster(tuple(NodeGroup(gpu=GPUS[gpu], count=256, gpus_per_node=8) for gpu in EIGHT))
    began = time.process_time()
    assert mapping_of(problem, cluster)
    return f"{time.process_time() - began:.1f} s"


def streaming() -> str:
    """A step of the placement that is best without streaming, and of the one that is searched with it."""
    cluster, lengths = cluster_of(("h100-80g", 1, 8), ("a100-80g", 2, 8)), lognormal(800, 8000, most=8192)
    data = {"maxPromptTokens": 2048, "maxResponseTokens": 8192}
    late, early = (
        job_of("PPO", rollout={"stream": mode}, training={"promptBatchSize": 256}, data=data) for mode in (False, True)
    )
    shapes = shapes_of(early)
    found = auto_map(late, cluster, shapes, device="GPU", responses=lengths)
    assert isinstance(found, DeviceMapping)
    after = said(predict(early, found, cluster, shapes, responses=lengths))
    return f"{said(auto_map(early, cluster, shapes, device='GPU', responses=lengths))} instead of {after}"


def on_a_t4() -> str:
    job = job_of("SFT")
    return said(auto_map(job, cluster_of(("t4-16g", 1, 4)), shapes_of(job), device="GPU"))


def too_long() -> str:
    job = grpo(tokens=8976)
    short = replace(SHAPES["8B"], positions=8192)
    try:
        return said(auto_map(job, cluster_of(("h100-80g", 1, 8)), shapes_of(job, short), device="GPU"))
    except ValueError as refused:
        return str(refused)


AFTER: Mapping[str, Callable[[], str]] = {
    "jobs slower with more memory, of 60": slower_with_memory,
    "8B on 1 H100": lambda: planned(SHAPES["8B"], 1),
    "32B on 8 H100": lambda: planned(SHAPES["32B"], 8),
    "8B GRPO, responses unknown": lambda: planned(SHAPES["8B"], 8),
    "8B GRPO, prompts known": lambda: planned(SHAPES["8B"], 8, prompts=(120.0,)),
    "reserve of an H100, GB": lambda: reserve("h100-80g"),
    "reserve of an A10G, GB": lambda: reserve("a10g-24g"),
    "16,384 GPUs of 8 types, 5 models": of_eight_types,
    "bf16 on T4": on_a_t4,
    "10,000 tokens for a model of 8,192": too_long,
    "streaming, searched": streaming,
}


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield (defect, before, now)."""
    for name, measure in AFTER.items():
        yield name, BEFORE[name], measure()
