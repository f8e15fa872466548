"""The answer of the mapper as the JSON of `rlhf plan --json`."""

from __future__ import annotations

from typing import Any

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.mapping import DeviceMapping, Infeasible, MappedPool, ModelPrediction, Prediction


def as_json(mapping: DeviceMapping | Infeasible) -> dict[str, Any]:
    """Return the mapper's answer as a JSON object with the same keys in every case.

    Times are in seconds; memory is in bytes of one GPU, except `short_bytes`, which is of all GPUs. If nothing fits,
    `pools` is empty and `infeasible` says why. Without a prediction `predicted` is null, and `models` is empty.
    """
    answer: dict[str, Any] = {"schema_version": 1, "predicted": None, "pools": [], "models": {}, "rejected": []}
    if isinstance(mapping, Infeasible):
        smallest = [{"gpu": gpu, "gpus": gpus} for gpu, gpus in mapping.smallest]
        short = {"reason": mapping.reason, "short_bytes": mapping.short_bytes, "smallest": smallest}
        return answer | {"infeasible": short | {"options": list(mapping.options)}}
    answer |= {
        "pools": [_pool(pool, mapping.prediction) for pool in mapping.pools],
        "rejected": [
            {
                "pools": [{"models": list(models), "gpu": gpu, "gpus": gpus} for models, gpu, gpus in each.pools],
                "predicted": {"step_seconds": each.step_seconds},
                "reason": each.reason,
            }
            for each in mapping.rejected
        ],
        "infeasible": None,
    }
    if prediction := mapping.prediction:
        roles = [role for pool in mapping.pools for role in pool.models]
        answer["models"] = {role: _model(mapping.sizes[role], prediction.models[role]) for role in roles}
        answer["predicted"] = {
            "step_seconds": prediction.step_seconds,
            "tokens_per_second": prediction.tokens_per_second,
            "phases": dict(prediction.phases),
            "stages": dict(prediction.stages),
            "gpu_memory_utilization": prediction.gpu_memory_utilization,
            "correction": dict(prediction.correction),
            "coefficients": prediction.coefficients,
            "response_tokens": prediction.response_tokens,
        }
    return answer


def _pool(pool: MappedPool, prediction: Prediction | None) -> dict[str, Any]:
    return {
        "name": pool.name,
        "models": list(pool.models),
        "gpu": pool.gpu,
        "gpus": pool.size,
        "nodes": len(pool.slots_per_machine),
        "zones": list(pool.zones),
        "memory_limit": prediction and prediction.memory_limit[pool.name],
    }


def _model(sizes: ParallelSizes, model: ModelPrediction) -> dict[str, Any]:
    generation = {"p_g": sizes.generation_pipeline, "t_g": sizes.generation_tensor, "d_g": sizes.micro}
    return {
        "p": sizes.pipeline,
        "t": sizes.tensor,
        "d": sizes.data,
        **(generation if "generation" in model.seconds else {}),
        "micro_batch": model.micro_batch,
        "offload": model.offload,
        "recomputes": model.recomputes,
        "seconds": dict(model.seconds),
        "memory": {stage: dict(parts) for stage, parts in model.memory.items()},
    }
