"""What plans promise, counted over many of them; `benchmarks/mapper.py issue` shows it."""

from __future__ import annotations

import math
from dataclasses import replace

from rlhf_mapper.auto_map import auto_map, mapping_of, predict, task_of
from rlhf_mapper.hardware import Cluster
from rlhf_mapper.mapping import DeviceMapping, Infeasible
from tests.mapper.oracles import held, public
from tests.mapper.planned_jobs import cluster_of, drawn, job_of, shapes_of

SEEDS = 320
"""Random jobs, of which most fit somewhere."""
BATCHES = (96, 128, 192, 240, 256, 320, 384, 500, 512, 640, 768, 1000)
NODES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8))
"""(how many, GPUs of each)."""


def overfull(recomputes: bool) -> tuple[int, int]:
    """(plans that need more than the whole GPU, plans) of random jobs, all with or all without recomputation."""
    found = wrong = 0
    for seed in range(SEEDS):
        job, cluster, shapes = drawn(seed)
        task = task_of(job, shapes, device="GPU")
        asked = {
            role: replace(each, work=replace(each.work, recomputes=recomputes)) if each.work.trained else each
            for role, each in task.wanted.items()
        }
        one = replace(task, wanted=asked)
        mapping = mapping_of(one, cluster)
        if mapping is None:
            continue
        memory_of = {group.gpu.name: group.gpu.memory for group in cluster.groups}
        found += 1
        wrong += any(
            held.fullest(mapping, pool, shapes, task.load.most_tokens) > memory_of[pool.gpu] for pool in mapping.pools
        )
    return wrong, found


def worse_with_more() -> tuple[int, int]:
    """(cases in which more GPUs give a slower plan or none, cases): PPO of 8B with responses of 8,192 tokens."""
    cases = worse = 0
    for batch in BATCHES:
        job = job_of(
            "PPO",
            data={"maxPromptTokens": 1024, "maxResponseTokens": 8192},
            training={"promptBatchSize": batch, "miniBatchSize": batch},
        )
        task = task_of(job, shapes_of(job, public.SHAPES["8B"]), device="GPU")
        before = math.inf
        for nodes, gpus in NODES:
            best = task.search(task.costs(cluster_of(("h100-80g", nodes, gpus))))
            seconds = best[0].seconds if best else math.inf
            cases += 1
            worse += seconds > before * (1 + 1e-9)
            before = seconds
    return worse, cases


def slower_for_the_network() -> float:
    """How much slower PPO of 8B is on 32 H100 as it is planned where nobody says what network they have.

    Its own model of a DGX's network, 3,200 Gb/s, against the best plan for that network; a share.
    """
    job = job_of("PPO", training={"promptBatchSize": 1024, "miniBatchSize": 128})
    shapes, silent = shapes_of(job, public.SHAPES["8B"]), cluster_of(("h100-80g", 4, 8))
    known = Cluster(tuple(replace(group, node_bandwidth=public.NETWORK) for group in silent.groups))
    planned = auto_map(job, silent, shapes, device="GPU")
    assert isinstance(planned, DeviceMapping)
    return seconds_of(predict(job, planned, known, shapes)) / seconds_of(auto_map(job, known, shapes, device="GPU")) - 1


def seconds_of(found: DeviceMapping | Infeasible) -> float:
    """Of a step."""
    assert isinstance(found, DeviceMapping)
    assert found.prediction
    return found.prediction.step_seconds
