"""What a mapping is predicted to take, model by model, and why other placements are slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_api.names import Role
from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_mapper.mapping import (
    STAGE_OF,
    STAGES,
    MappedPool,
    ModelPrediction,
    Phase,
    Prediction,
    Rejected,
    Stage,
)
from rlhf_mapper.pools import Choice, PoolCosts, moves
from rlhf_mapper.search.objective import Objective
from rlhf_mapper.search.tables import Found
from rlhf_mapper.simulate import generation, memory
from rlhf_mapper.simulate.layouts import Layouts
from rlhf_mapper.strategy import GeneratingStrategies, Strategies

MOVED: tuple[Phase, ...] = ("reshard", "scoring", "update")
"""The phase of each stage in which offloaded states come and go."""


@dataclass(frozen=True)
class Cut:
    """How one model of a pool is cut, and what that takes."""

    sizes: ParallelSizes
    predicted: ModelPrediction
    generator_share: float = 0.0
    """Of a GPU's memory, for the generator's weights and cache."""


def cuts_of(costs: PoolCosts, models: frozenset[str], group: int, gpus: int) -> dict[Role, Cut]:
    """The strategies behind the stage costs of a pool."""
    choice, size = costs.chosen(models, group, gpus)
    return {role: _cut(costs, role, group, choice, size) for role in costs.living(models)}


def prediction_of(costs: PoolCosts, found: Found, cuts: dict[Role, Cut], pools: Sequence[MappedPool]) -> Prediction:
    """Of a step whose stages take what was found; within a stage the slowest pool counts."""
    limits = {gpu.name: gpu.memory for gpu in (setting.nodes.gpu for setting in costs.settings)}
    stages = dict(zip(STAGES, found.stages, strict=True))
    generating = cuts["actor"].predicted.seconds if "actor" in cuts else {}
    phases: dict[Phase, float] = {
        phase: generating.get(phase, 0.0) if stage == "generation" else stages[stage]
        for phase, stage in STAGE_OF.items()
    }
    return Prediction(
        step_seconds=found.seconds,
        tokens_per_second=costs.settings[0].load.tokens / found.seconds,
        phases={phase: seconds for phase, seconds in phases.items() if seconds},
        stages=stages,
        models={role: cut.predicted for role, cut in cuts.items()},
        memory_limit={pool.name: memory.USABLE_SHARE * limits[pool.gpu] for pool in pools},
        gpu_memory_utilization=max(cut.generator_share for cut in cuts.values()),
        correction=costs.settings[0].correction.factors,
    )


def rejected_of(costs: PoolCosts, found: Sequence[Found], objective: Objective) -> tuple[Rejected, ...]:
    """The placements after the first, each with what it loses by."""
    return tuple(
        Rejected(
            pools=tuple(
                (costs.living(models), costs.settings[group].nodes.gpu.name, gpus) for models, group, gpus in each.sets
            ),
            step_seconds=each.seconds,
            reason=_reason(costs, found[0], each, objective),
        )
        for each in found[1:]
    )


def _reason(costs: PoolCosts, best: Found, other: Found, objective: Objective) -> str:
    """What counts: GPUs, the price, or the stage that loses most time and the pool that everybody waits for there."""
    if objective.kind == "fewest_gpus" and other.gpus > best.gpus:
        return f"takes {other.gpus} GPUs instead of {best.gpus}"
    if objective.kind == "lowest_cost" and (dearer := _price(other, objective) - _price(best, objective)) > 0:
        return f"costs {dearer / _price(best, objective):.1%} more a step"
    lost = [mine - least for mine, least in zip(other.stages, best.stages, strict=True)]
    stage = int(np.argmax(lost))
    if lost[stage] <= 0:
        return f"as fast, with {other.gpus} GPUs instead of {best.gpus}"
    models, _, gpus = max(other.sets, key=lambda pool: float(costs.seconds(*pool)[stage]))
    slow = ", ".join(costs.living(models))
    return f"{STAGES[stage]} takes {_time(lost[stage])} longer: all wait for {slow} on {gpus} GPUs"


def _price(found: Found, objective: Objective) -> float:
    return found.seconds * sum(gpus * objective.prices[group] for _, group, gpus in found.sets)


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _cut(costs: PoolCosts, role: Role, group: int, choice: Choice, size: int) -> Cut:
    strategies = costs.strategies(role, group, choice.least)
    room, wanted, setting = int(choice.room[size]), strategies.wanted, strategies.setting
    seconds: dict[Phase, float] = {}
    row, generator = int(strategies.best[room, size]), (1, 1)
    if isinstance(strategies, GeneratingStrategies):
        place = int(choice.generator[size])
        row, generator = strategies.row(room, place, size), tuple(strategies.generators[place].tolist())
        seconds["reshard"] = strategies.moved(room, place, size)
        seconds["generation"] = float(strategies.generated(choice.cache)[place, size])
    seconds["scoring"] = float(strategies.read[room, row, size])
    seconds["update"] = float(strategies.trained[room, row, size])
    pipeline, tensor = strategies.cuts[row].tolist()
    gpus = int(strategies.gpus[size])
    sizes = ParallelSizes(
        pipeline=pipeline,
        tensor=tensor,
        data=gpus // (pipeline * tensor),
        replicas=wanted.replicas,
        generation_pipeline=generator[0] if wanted.work.generated else 0,
        generation_tensor=generator[1] if wanted.work.generated else 0,
    )
    micro_batch = int(strategies.micro_batch[room, row, size])
    held = memory.parts_of_gpu(
        costs.states(role, group),
        setting.software,
        replica=choice.least,
        gpus=np.array(gpus / wanted.replicas),
    )
    if choice.offloads:
        moved = moves(wanted, held, setting)
        for phase, each in zip(MOVED, moved.tolist(), strict=True):
            seconds[phase] = seconds.get(phase, 0.0) + each
    parts = _memory(strategies, sizes, {part: float(size) for part, size in held.items()}, micro_batch, choice, size)
    generating = parts.get("generation", {})
    used = generating.get("generator", 0.0) + generating.get("kv_cache", 0.0)
    return Cut(
        sizes,
        ModelPrediction(
            micro_batch=micro_batch,
            offload=("All" if wanted.work.trained else "Parameters") if choice.offloads else "None",
            seconds={phase: value for phase, value in seconds.items() if value},
            memory=parts,
        ),
        used / setting.nodes.gpu.memory,
    )


def _memory(
    strategies: Strategies,
    sizes: ParallelSizes,
    held: dict[str, float],
    micro_batch: int,
    choice: Choice,
    size: int,
) -> dict[Stage, dict[str, float]]:
    """Bytes of a GPU by stage and part."""
    work, load, passes = strategies.wanted.work, strategies.setting.load, strategies.passes
    in_use: dict[Stage, bool] = {
        "generation": bool(work.generated),
        "preparation": bool(work.read),
        "training": bool(work.trained),
    }
    layouts = Layouts(*(np.array(float(each)) for each in (sizes.pipeline, sizes.tensor, sizes.data)))
    tokens = np.array(micro_batch * load.most_tokens)
    parts: dict[Stage, dict[str, float]] = {}
    for stage, used in in_use.items():
        waits = choice.offloads and (not used or stage == "generation")  # the generator has its own copy
        resident = {} if waits else held
        parts[stage] = dict(resident)
    for stage in ("preparation", "training"):
        if in_use[stage]:
            trains = stage == "training"
            parts[stage]["activations"] = float(
                memory.activations(
                    strategies.wanted.model,
                    strategies.setting.software,
                    layouts,
                    tokens,
                    kept=memory.kept_of(work, trains=trains),
                )
                + memory.gathered(strategies.wanted.model, strategies.setting.software, layouts)
            )
    if in_use["generation"]:
        place = int(choice.generator[size])
        generator = Layouts(
            np.array(float(sizes.generation_pipeline)), np.array(float(sizes.generation_tensor)), layouts.d
        )
        running = generation.running(passes, load, generator, np.array(choice.cache[place, size]))
        of_a_replica = np.ceil(work.generated / work.passes / (sizes.data * sizes.micro))
        parts["generation"]["generator"] = float(generation.weights_of_gpu(passes, generator))
        parts["generation"]["kv_cache"] = float(
            np.minimum(running, of_a_replica) * generation.cached_bytes(passes, generator, load.most_tokens)
        )
    return parts
