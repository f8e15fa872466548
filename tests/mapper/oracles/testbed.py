"""HybridFlow's testbed and published figures, which the coefficients are held against (arXiv 2409.19256, section 8).

16 machines of 8 A100-80GB, NVLink 600 GB/s within one and 200 Gb/s between them; Llama models, all of one size in a
run; 1024 prompts of 1024 tokens, responses of 1024 tokens, 8 mini-batches. The throughputs are read off its figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from rlhf_api.names import Role
from rlhf_api.spec.parallel_sizes import Parallelism
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import TRAINER, Correction, Efficiency, Reserve
from rlhf_mapper.hardware import GPUS, NodeGroup
from rlhf_mapper.pools import PoolCosts, pool_sizes
from rlhf_mapper.prediction import cuts_of
from rlhf_mapper.strategy import ModelRequest, Setting
from rlhf_mapper.workload import Lengths, Work, Workload

Size = Literal["7B", "13B", "34B", "70B"]
Recipe = Literal["PPO", "ReMax", "SafeRLHF"]

EFFICIENCY = Efficiency(  # benchmarks/fit.py paper says what is left with these
    kernel=0.64,
    scoring=0.64,
    prefill=0.64,
    balance=1.0,
    rollout=1.0,
    memory=0.8,
    link=0.8,
    network=0.8,
    decode_seconds=5e-3,
    sequence_seconds=6e-5,
    update_seconds=0.25,
    call_seconds=0.3,
    stage_seconds=2.5e-3,
    transition_seconds=2.7,  # the smallest published one (Figure 14)
)
SOFTWARE = replace(
    TRAINER,
    name="Megatron-core 0.6 and vLLM 0.3.1",
    layers="Megatron",
    products="Roofline",
    shards_weights=False,
    weight_bytes=2,  # bf16; gradients, master weights and moments are float32
    gradient_bytes=4,
    optimizer_bytes=12,
    frozen_bytes=2,
    rereads_kv=True,
    running_sequences=256,
    may_offload=False,
    reserve=Reserve(context=0, nccl=0, graphs=0, fragmented=0.08),
    state_share=0.8,  # with 18 and 2 bytes a parameter it gives the published smallest clusters
    efficiency=EFFICIENCY,
)
PRETRAINING_SHARE = 1 / 8
"""Of the batch, as many rows as Safe-RLHF's pretraining loss reads."""


def _llama(layers: int, hidden: int, kv_heads: int, ffn: int) -> Architecture:
    return Architecture(
        layers=layers,
        hidden=hidden,
        heads=hidden // 128,
        kv_heads=kv_heads,
        head_size=128,
        ffn=ffn,
        vocabulary=32000,
    )


MODELS: Mapping[Size, Architecture] = MappingProxyType(
    {
        "7B": _llama(32, 4096, 32, 11008),
        "13B": _llama(40, 5120, 40, 13824),
        "34B": _llama(48, 8192, 8, 22016),
        "70B": _llama(80, 8192, 8, 28672),
    }
)
LAYOUTS: Mapping[Size, tuple[int, int, int]] = MappingProxyType(
    {"7B": (1, 8, 2), "13B": (1, 8, 4), "34B": (4, 8, 8), "70B": (8, 8, 8)}
)
"""p, t and t_g of the trained models (Figure 14); p_g is 1."""

THROUGHPUT: Mapping[tuple[Size, int], float] = MappingProxyType(
    {
        ("7B", 8): 5.7e3,
        ("7B", 16): 11.0e3,
        ("7B", 32): 18.3e3,
        ("7B", 64): 25.9e3,
        ("7B", 128): 37.5e3,
        ("34B", 32): 6.1e3,
        ("34B", 64): 8.9e3,
        ("34B", 128): 14.4e3,
    }
)
"""(size, GPUs) -> tokens/s of PPO with HybridFlow (Figure 9)."""

PLACEMENTS: Mapping[str, tuple[frozenset[Role], ...]] = {
    "colocate": (frozenset({"actor", "critic", "reference", "reward"}),),
    "split": (frozenset({"actor", "reference"}), frozenset({"critic", "reward"})),
    "standalone": tuple(frozenset({role}) for role in ("actor", "critic", "reference", "reward")),
}
PLACED: Mapping[int, Mapping[str, float]] = {
    16: {"colocate": 6.4e3, "split": 5.3e3, "standalone": 3.8e3},
    24: {"colocate": 7.4e3, "split": 6.7e3, "standalone": 5.3e3},
    32: {"colocate": 10.1e3, "split": 8.3e3, "standalone": 7.4e3},
    64: {"colocate": 16.7e3, "split": 14.7e3, "standalone": 13.1e3},
    96: {"colocate": 19.3e3, "split": 20.5e3, "standalone": 18.0e3},
    128: {"colocate": 24.2e3, "split": 25.7e3, "standalone": 26.0e3},
}
"""GPUs -> tokens/s of PPO with 13B models in each placement (Figure 12)."""

TRANSITION: Mapping[tuple[Size, int], float] = {
    **{("7B", gpus): seconds for gpus, seconds in zip((8, 16, 32, 64, 128), (2.7, 2.7, 2.7, 3.0, 3.8), strict=True)},
    **{("13B", gpus): seconds for gpus, seconds in zip((16, 32, 64, 128), (2.9, 2.9, 3.1, 3.2), strict=True)},
    **{("34B", gpus): 4.7 for gpus in (32, 64, 128)},
    **{("70B", gpus): 9.8 for gpus in (64, 128)},
}
"""(size, GPUs) -> seconds of HybridFlow's transition (Figure 14)."""

GENERATION: Mapping[Size, Mapping[int, float]] = {
    "7B": {8: 86.1, 4: 43.9, 2: 33.9, 1: 31.3},
    "13B": {8: 223.8, 4: 141.9, 2: 159.1, 1: 230.0},
}
"""size -> t_g -> seconds of generation on 16 GPUs with training in 1-8-2 (Figure 15)."""


def machines(gpus: int) -> NodeGroup:
    """So many GPUs of the testbed."""
    gpu = replace(GPUS["a100-80g"], memory=80e9)  # the coefficients were found with it
    return NodeGroup(gpu=gpu, count=gpus // 8, gpus_per_node=8, link_bandwidth=600e9, node_bandwidth=25e9)


def work_of(recipe: Recipe, sequences: int = 1024, mini_batches: int = 8) -> dict[Role, Work]:
    """What each model of an algorithm does in a step; log-probabilities come from generation (Table 4).

    Safe-RLHF has one critic and a pretraining batch (Figure 1).
    """
    read = Work(read=sequences)
    trained = Work(read=sequences, trained=sequences, updates=mini_batches)
    actor = Work(generated=sequences, passes=1, trained=sequences, updates=mini_batches)
    if recipe == "ReMax":
        return {
            "actor": replace(actor, generated=2 * sequences, passes=2),
            "reference": read,
            "reward": Work(read=2 * sequences),
        }
    work: dict[Role, Work] = {"actor": actor, "critic": trained, "reference": read, "reward": read}
    if recipe == "SafeRLHF":
        rows = PRETRAINING_SHARE * sequences
        work |= {"actor": replace(actor, read=rows, trained=sequences + rows), "cost": read}
    return work


def costs_of(
    size: Size,
    gpus: int,
    recipe: Recipe = "PPO",
    *,
    layout: bool = True,
    generation_tensor: int | None = None,
    efficiency: Efficiency = EFFICIENCY,
) -> PoolCosts:
    """Stage costs on so many GPUs; `layout`: trained models are cut as published, else as the mapper likes."""
    work = work_of(recipe)
    load = Workload(sequences=1024, prompt=Lengths((1024.0,)), response=Lengths((1024.0,)), work=work)
    pipeline, tensor, t_g = LAYOUTS[size]
    wanted = {
        role: ModelRequest(
            model=replace(MODELS[size], scores=role not in ("actor", "reference")),
            work=each,
            sizes=Parallelism(pipeline=pipeline, tensor=tensor) if layout and each.trained else None,
            generation_pipeline=1,
            generation_tensor=generation_tensor or (t_g if layout else None),
        )
        for role, each in work.items()
    }
    nodes, software = machines(gpus), replace(SOFTWARE, efficiency=efficiency)
    return PoolCosts(wanted, [Setting(nodes, software, load, Correction())], [pool_sizes(nodes)])


def generation_seconds(size: Size, t_g: int, efficiency: Efficiency = EFFICIENCY) -> float:
    """Of PPO on 16 GPUs, all models together and trained in the published layout; inf where it does not fit."""
    costs = costs_of(size, 16, generation_tensor=t_g, efficiency=efficiency)
    together = PLACEMENTS["colocate"][0]
    if math.isinf(costs.seconds(together, 0, 16)[0]):
        return math.inf
    return cuts_of(costs, together, 0, 16)["actor"].predicted.seconds["generation"]


def roles(recipe: Recipe) -> Iterable[Role]:
    """The models of an algorithm."""
    return work_of(recipe)
