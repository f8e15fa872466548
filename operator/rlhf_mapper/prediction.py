"""Prediction of a mapping, model by model, and the reasons why other placements are slower."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhf_api.names import Role, slots_text
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import ErrorKind, Software
from rlhf_mapper.fused_schedule import FusedUpdates, PipelineUpdate
from rlhf_mapper.hardware import Gpu
from rlhf_mapper.kernels import nearest
from rlhf_mapper.mapping import (
    FUSED,
    STAGE_OF,
    STAGES,
    MappedPool,
    ModelPrediction,
    Phase,
    Prediction,
    Rejected,
    Stage,
    share_stages,
)
from rlhf_mapper.pools import PoolCosts, StateChoice, offload_seconds
from rlhf_mapper.search.objective import Objective
from rlhf_mapper.search.tables import Found
from rlhf_mapper.simulate import generation, memory, training
from rlhf_mapper.simulate.layouts import Layouts
from rlhf_mapper.strategy import GeneratingStrategies, Strategies
from rlhf_mapper.workload import Workload

NEAR = 0.02
"""Share of the fastest step within which a placement in fewer pools is taken instead."""
LAYOUT_ERROR = 0.1
"""Relative error of the ratio of two predictions for one job: the median over 16 pairs of measured placements.

The pairs are from HybridFlow's Figure 12. A single prediction has a much larger error: in the ratio of two predictions,
wrong assumptions about the job cancel, such as a kernel's share of the peak.
"""
Parts = dict[Stage, dict[str, float]]
"""Bytes of a GPU by stage and use: weights, gradients, optimizer, activations, generator or kv_cache."""
OFFLOAD_PHASES: tuple[Phase, ...] = ("reshard", "scoring", "update")
"""Phase to which the seconds of moving offloaded states to the GPU and back are added, for each stage in `STAGES`."""


@dataclass(frozen=True)
class Cut:
    """Parallel sizes of one model in a pool, with the predicted time and memory."""

    sizes: ParallelSizes
    predicted: ModelPrediction
    generator_share: float
    """Share of a GPU's memory for the generator's weights and cache."""
    pinned: float
    """Bytes of host memory for a GPU's states of all models of the pool."""
    update: PipelineUpdate
    """Passes of one optimizer step, through each pipeline stage."""


def cuts_of(costs: PoolCosts, models: frozenset[str], group: int, gpus: int) -> dict[Role, Cut]:
    """Return the cut of each model that gives a pool of `gpus` GPUs its stage costs."""
    choice, size = costs.chosen(models, group, gpus)
    return {
        role: _cut(
            costs.strategies(role, models, group, choice.least, choice.offload),
            costs.states(role, group, choice.offload),
            choice,
            size,
        )
        for role in costs.roles_of(models)
    }


def prediction_of(costs: PoolCosts, found: Found, cuts: dict[Role, Cut], pools: Sequence[MappedPool]) -> Prediction:
    """Return the prediction of a step with a found placement; each stage takes as long as the slowest pool."""
    sizes, shared = {setting.nodes.gpu.name: setting.nodes.gpu.memory for setting in costs.settings}, costs.settings[0]
    limits: dict[str, float] = {}
    for pool in pools:
        generates = any("generation" in cuts[role].predicted.seconds for role in pool.models)
        limits[pool.name] = float(memory.usable(shared.software, sizes[pool.gpu], pool.size, generates=generates))
    low, high = shared.software.errors[error_kind((each.model for each in costs.requests.values()), shared.load)]
    prediction = Prediction(
        step_seconds=found.seconds,
        low=found.seconds * low,
        high=found.seconds * high,
        tokens_per_second=shared.load.tokens / found.seconds,
        phases=_phases(found, cuts, pools, streams=shared.load.streams),
        stages=dict(zip(STAGES, found.stages, strict=True)),
        models={role: cut.predicted for role, cut in cuts.items()},
        memory_limit=limits,
        host_memory={pool.name: max(cuts[role].pinned for role in pool.models) for pool in pools},
        gpu_memory_utilization=max(cut.generator_share for cut in cuts.values()),
        correction=shared.correction.factors,
        coefficients=_coefficients(shared.software, {costs.settings[group].nodes.gpu for _, group, _ in found.sets}),
        response_tokens=shared.load.response.mean,
        prompt_tokens=shared.load.prompt.mean,
        response_source=shared.load.response.source,
        prompt_source=shared.load.prompt.source,
        works_ahead=shared.load.works_ahead,
    )
    if shared.load.may_fuse_updates and share_stages(pools, {role: cut.sizes for role, cut in cuts.items()}):
        actor, critic = (cuts[role] for role in FUSED)
        updates = FusedUpdates(actor.sizes.pipeline, actor.update, replace(critic.update, reverses=True))
        fused = _with_fused_updates(prediction, updates, pools, shared.load)
        fits = all(sum(fused.peak(pool.models, "training").values()) <= fused.memory_limit[pool.name] for pool in pools)
        return fused if fits and all(fused.models[role].offload == "None" for role in FUSED) else prediction
    return prediction


def _with_fused_updates(
    prediction: Prediction, fused: FusedUpdates, pools: Sequence[MappedPool], load: Workload
) -> Prediction:
    """Return the prediction with fused updates; the updates of both models become shorter by the same factor."""
    models = prediction.models
    saved = load.work["actor"].updates * (fused.alone.seconds - fused.schedule.seconds)
    factor = 1 - saved / sum(models[role].seconds["update"] for role in FUSED)
    after = dict(models)
    for role in FUSED:
        seconds: dict[Phase, float] = {**models[role].seconds, "update": factor * models[role].seconds["update"]}
        after[role] = replace(models[role], seconds=seconds)
    least = _slowest_update(models, pools) - _slowest_update(after, pools)
    step = max(prediction.step_seconds - least, prediction.stages["generation"])
    ratio = step / prediction.step_seconds
    return replace(
        prediction,
        step_seconds=step,
        low=ratio * prediction.low,
        high=ratio * prediction.high,
        tokens_per_second=prediction.tokens_per_second / ratio,
        phases={**prediction.phases, "update": prediction.phases["update"] - least},
        stages={**prediction.stages, "training": prediction.stages["training"] - least},
        models=after,
        fused_updates=fused,
    )


def _slowest_update(models: Mapping[Role, ModelPrediction], pools: Sequence[MappedPool]) -> float:
    """Return the seconds of the updates in the pool where they take longest."""
    return max(sum(models[role].seconds.get("update", 0.0) for role in pool.models) for pool in pools)


def error_kind(models: Iterable[Architecture], load: Workload) -> ErrorKind:
    """Return the kind of job whose errors (`Software.errors`) bound the interval of a prediction.

    By Student's t of the sources' mean errors (`benchmarks/fit.py ours --leave-out`), a source outside the fit lies
    in the interval with a probability of 80 %. The share of points of left-out sources in it has not been counted.
    """
    if any(model.experts > 1 for model in models):
        return "Experts"
    if not any(work.generated for work in load.work.values()):
        return "Training"
    return "Async" if load.works_ahead else "Sync"


def differ(first: float, second: float) -> bool:
    """Whether two predicted durations of one job differ by more than the error of their ratio (`LAYOUT_ERROR`)."""
    return max(first, second) > (1 + LAYOUT_ERROR) * min(first, second)


def _coefficients(software: Software, gpus: Iterable[Gpu]) -> str:
    """Return in words the software of the coefficients, the GPUs of the measured kernels, and what is quantised."""
    parts = {"linear weights": software.linear_bytes, "KV cache": software.cache_bytes}
    rounded = " and ".join(part for part, bytes_ in parts.items() if bytes_)
    rounded = rounded and f"; the generator's {rounded} by their bytes in 8 bits"
    if software.products == "Roofline":
        return f"{software.name}{rounded}"
    sources = {gpu.name: nearest(gpu).gpu.name for gpu in gpus}
    said = (of if name == of else f"{of} (estimated for {name})" for name, of in sorted(sources.items()))
    return f"{software.name}, {software.layers.lower()} layers, kernels as measured on {' and '.join(said)}{rounded}"


def _phases(
    found: Found, cuts: Mapping[Role, Cut], pools: Sequence[MappedPool], *, streams: bool
) -> dict[Phase, float]:
    """Return the seconds of each phase that takes time in a step. streams: part of scoring overlaps generation."""
    stages = dict(zip(STAGES, found.stages, strict=True))
    generator = cuts.get("rollout") or cuts.get("actor")
    generating = generator.predicted.seconds if generator else {}
    phases: dict[Phase, float] = {
        phase: generating.get(phase, 0.0) if stage == "generation" else stages[stage]
        for phase, stage in STAGE_OF.items()
    }
    if streams:
        of_pools = [sum(cuts[role].predicted.seconds.get("scoring", 0.0) for role in pool.models) for pool in pools]
        phases["scoring"] = max(phases["scoring"], *of_pools)
    return {phase: seconds for phase, seconds in phases.items() if seconds}


def simplest_first(found: list[Found]) -> list[Found]:
    """Return placements, fastest first, with the one in the fewest pools before those faster by less than NEAR."""
    near = (each for each in found if each.seconds <= (1 + NEAR) * found[0].seconds)
    simplest = min(near, key=lambda each: len(each.sets))
    return [simplest, *(each for each in found if each is not simplest)]


def rejected_of(costs: PoolCosts, found: Sequence[Found], objective: Objective) -> tuple[Rejected, ...]:
    """Return the placements after the first and best one, each with the reason why it loses."""
    return tuple(
        Rejected(
            pools=tuple(
                (costs.roles_of(models), costs.settings[group].nodes.gpu.name, gpus)
                for models, group, gpus in each.sets
            ),
            step_seconds=each.seconds,
            reason=_reason(costs, found[0], each, objective),
        )
        for each in found[1:]
    )


def _reason(costs: PoolCosts, best: Found, other: Found, objective: Objective) -> str:
    """Return why a placement is worse than the best: more GPUs, price or pools, or a slower stage and its slow pool."""
    kind = costs.settings[0].nodes.gpu.name
    if objective.kind == "fewest_gpus" and other.gpus > best.gpus:
        return f"takes {slots_text(other.gpus, kind)} instead of {best.gpus}"
    least = _price(best, objective) if objective.kind == "lowest_cost" else 0.0
    if objective.kind == "lowest_cost" and (dearer := _price(other, objective) - least) > 0:
        return f"costs {dearer / least:.1%} more a step" if least else "costs something, and the best nothing"
    if other.seconds < best.seconds:
        return f"takes {len(other.sets)} pools instead of {len(best.sets)}"
    lost = [mine - least for mine, least in zip(other.stages, best.stages, strict=True)]
    stage = int(np.argmax(lost))
    if lost[stage] <= 0:
        return f"as fast, with {slots_text(other.gpus, kind)} instead of {best.gpus}"
    models, _, gpus = max(other.sets, key=lambda pool: float(costs.seconds(*pool)[stage]))
    slow = ", ".join(costs.roles_of(models))
    time = f"{lost[stage]:.1f} s" if lost[stage] >= 1 else f"{1000 * lost[stage]:.0f} ms"
    return f"{STAGES[stage]} takes {time} longer: all wait for {slow} on {slots_text(gpus, kind)}"


def _price(found: Found, objective: Objective) -> float:
    return found.seconds * sum(gpus * objective.prices[group] for _, group, gpus in found.sets)


def _cut(strategies: Strategies, states: Mapping[memory.Part, float], choice: StateChoice, size: int) -> Cut:
    """Return a model's cut in a pool that keeps states by `choice`; size: index of the pool size in its arrays."""
    work, setting = strategies.request.work, strategies.setting
    row, sizes, seconds = _strategy(strategies, choice, size)
    micro_batch = int(strategies.way.micro_batch[choice.room[size], row, size])
    recomputes = bool(strategies.way.recomputes[choice.room[size], row, size])
    held = memory.parts_of_gpu(
        states, setting.software, replica=choice.least, gpus=np.array(int(strategies.gpus[size]) / sizes.replicas)
    )
    offloads = choice.offload == "All"
    if offloads:
        moved = offload_seconds(strategies.request, held, setting)
        for phase, each in zip(OFFLOAD_PHASES, moved.tolist(), strict=True):
            seconds[phase] = seconds.get(phase, 0.0) + each
    # Offloaded states are away while generation uses a copy, and in the stages that do not use the model.
    uses = {"generation": False, "preparation": bool(work.read), "training": bool(work.trained)}
    parts: Parts = {
        stage: {part: float(size) for part, size in held.items()} if uses[stage] or not offloads else {}
        for stage in STAGES
    }
    _add_passes(parts, strategies, sizes, micro_batch, recomputes=recomputes)
    generator = _generator_memory(strategies, sizes, choice, size) if work.generated else {}
    parts["generation"] |= generator
    predicted = ModelPrediction(
        micro_batch=micro_batch,
        offload=choice.offload if work.trained else "Parameters" if offloads else "None",
        recomputes=recomputes,
        seconds={phase: value for phase, value in seconds.items() if value},
        memory=parts,
    )
    share = sum(generator.values()) / setting.nodes.gpu.memory
    return Cut(sizes, predicted, share, float(choice.pinned[size]), _update(strategies, sizes, predicted))


def _update(strategies: Strategies, sizes: ParallelSizes, predicted: ModelPrediction) -> PipelineUpdate:
    """Return the passes of an update; a backward pass takes two thirds of a micro-batch's seconds."""
    work, setting = replace(strategies.request.work, recomputes=predicted.recomputes), strategies.setting
    if not work.trained:
        return PipelineUpdate(micro_batches=0)
    rows = strategies.rows(np.array([float(predicted.micro_batch)]), work.trained_together)
    count, one, _ = training.micro_batches(strategies.passes, work, setting.load, _layouts(sizes), rows)
    third = float(one[0]) * setting.correction.of("update") / 3
    return PipelineUpdate(micro_batches=round(float(count[0])), forward=third, backward=2 * third)


def _strategy(strategies: Strategies, choice: StateChoice, size: int) -> tuple[int, ParallelSizes, dict[Phase, float]]:
    """Return (index into `cuts`, sizes, seconds by phase without offloading) of the choice's fastest strategy."""
    room = int(choice.room[size])
    seconds: dict[Phase, float] = {}
    row, generator = int(strategies.best[room, size]), (0, 0)
    if isinstance(strategies, GeneratingStrategies):
        place = int(choice.generator[size])
        _, rows, moved = strategies.of_training
        row, generator = int(rows[room, place, size]), tuple(strategies.generators[place].tolist())
        seconds["reshard"] = float(moved[room, place, size])
        seconds["generation"] = float(strategies.generation_seconds(choice.cache)[place, size])
    seconds["scoring"] = float(strategies.way.inference_seconds[room, row, size])
    seconds["update"] = float(strategies.way.training_seconds[room, row, size])
    pipeline, tensor, context = strategies.cuts[row].tolist()
    expert = int(strategies.way.expert[room, row, size])
    if strategies.request.work.receives_weights:  # a rollout pool trains nothing, so it has no other cut
        (pipeline, tensor), context, expert = generator, 1, 1
    sizes = ParallelSizes(
        pipeline=pipeline,
        tensor=tensor,
        context=context,
        data=int(strategies.gpus[size]) // (pipeline * tensor * context),
        replicas=strategies.request.replicas,
        expert=expert,
        generation_pipeline=generator[0],
        generation_tensor=generator[1],
    )
    return row, sizes, seconds


def _add_passes(
    parts: Parts, strategies: Strategies, sizes: ParallelSizes, micro_batch: int, *, recomputes: bool
) -> None:
    """Add the peak memory of model passes to `parts`: a rank's shards of the gradients, and the rest as activations."""
    work, setting, layouts = strategies.request.work, strategies.setting, _layouts(sizes)
    tokens = micro_batch * setting.load.most_tokens / sizes.context
    if work.read:
        parts["preparation"]["activations"] = float(memory.fullest(strategies.reading(layouts), tokens))
    if work.trained:
        accumulates = micro_batch < np.ceil(work.trained / work.updates / sizes.data)
        moments = strategies.updating(layouts, recomputes=recomputes, accumulates=bool(accumulates))
        held = float(memory.fullest(moments, tokens))
        if "gradients" not in parts["training"]:
            on_gpu = setting.software.gradient_bytes * (not work.steps_in_host)
            shards = strategies.request.model.parameters * work.trained_share * on_gpu * sizes.replicas
            parts["training"]["gradients"] = min(shards / sizes.world_size, held)
            held -= parts["training"]["gradients"]
        parts["training"]["activations"] = held


def _generator_memory(strategies: Strategies, sizes: ParallelSizes, choice: StateChoice, size: int) -> dict[str, float]:
    """Return the bytes of a GPU for the generator's copy of the weights and for the filled part of its KV cache."""
    work, load, passes = strategies.request.work, strategies.setting.load, strategies.passes
    p_g, t_g = np.array(float(sizes.generation_pipeline)), np.array(float(sizes.generation_tensor))
    generator = Layouts(p_g, t_g, _layouts(sizes).d)
    running = generation.running(passes, load, generator, np.array(choice.cache[choice.generator[size], size]))
    of_a_replica = np.ceil(work.generated / work.passes / (sizes.data * sizes.micro))
    held, longest = (generation.cached_bytes(passes, generator, each) for each in (load.held_tokens, load.most_tokens))
    return {
        "generator": float(generation.weights_of_gpu(passes, generator)),
        "kv_cache": float(np.maximum(np.minimum(running, of_a_replica) * held, longest)),
    }


def _layouts(sizes: ParallelSizes) -> Layouts:
    every = (sizes.pipeline, sizes.tensor, sizes.data, sizes.context, sizes.expert)
    return Layouts(*(np.array(float(each)) for each in every))
