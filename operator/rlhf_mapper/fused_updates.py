"""Prediction of a step in which the updates of actor and critic run as one schedule of a pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlhf_api.names import Role
from rlhf_mapper.fused_schedule import FusedUpdates
from rlhf_mapper.mapping import FUSED, MappedPool, ModelPrediction, Prediction
from rlhf_mapper.workload import Workload


def with_fused_updates(
    prediction: Prediction,
    fused: FusedUpdates,
    pools: Sequence[MappedPool],
    load: Workload,
) -> Prediction:
    """Return the prediction with fused updates; those of both models become shorter by the same factor."""
    models = prediction.models
    saved = load.work["actor"].updates * (fused.alone.seconds - fused.schedule.seconds)
    factor = 1 - saved / sum(models[role].seconds["update"] for role in FUSED)
    after = dict(models)
    for role in FUSED:
        seconds: dict[Phase, float] = {**models[role].seconds, "update": factor * models[role].seconds["update"]}
        after[role] = replace(models[role], seconds=seconds)
    least = _slowest(models, pools) - _slowest(after, pools)
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


def _slowest(models: Mapping[Role, ModelPrediction], pools: Sequence[MappedPool]) -> float:
    """Return the seconds of the updates in the pool where they take longest."""
    return max(sum(models[role].seconds.get("update", 0.0) for role in pool.models) for pool in pools)
