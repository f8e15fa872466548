"""A job with what its manifest leaves open filled in, as the mapper decided."""

from __future__ import annotations

from typing import Any

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec import Model
from rlhf_mapper.mapping import Mapping

ENGINE_SHARE = 0.05
"""Of a GPU's memory, what the generator needs besides its weights and KV cache."""


def as_mapped(job: Job, role: Role, placed: Mapping) -> Job:
    """The job as the worker of one model reads it: on GPUs with the mapper's micro-batch, offload and cache.

    What the manifest says itself stays; micro-batches only become smaller, so that they fit.
    """
    prediction = placed.prediction
    if placed.device == "CPU" or prediction is None:
        return job
    spec, mapped = job.spec, prediction.models[role]
    longest = spec.data.max_prompt_tokens + spec.data.max_response_tokens
    tokens = min(spec.training.micro_batch_tokens, mapped.micro_batch * longest)
    share = spec.rollout.gpu_memory_utilization or min(prediction.gpu_memory_utilization + ENGINE_SHARE, 0.95)
    changes: dict[str, Any] = {
        "training": spec.training.model_copy(update={"micro_batch_tokens": tokens}),
        "rollout": spec.rollout.model_copy(update={"gpu_memory_utilization": share}),
    }
    field = job.spec.models.field(role)
    model = getattr(spec.models, field, None)
    if isinstance(model, Model) and model.offload == "None" and mapped.offload != "None":
        changes["models"] = spec.models.model_copy(update={field: model.model_copy(update={"offload": mapped.offload})})
    return job.model_copy(update={"spec": spec.model_copy(update=changes)})
