"""What a worker is made from, with what the manifest leaves open filled in as the mapper decided."""

from __future__ import annotations

from dataclasses import replace

from rlhf_mapper.mapping import DeviceMapping
from rlhf_trainer.workers.base import WorkerSetting

ENGINE_SHARE = 0.05
"""Of a GPU's memory, what the generator needs besides its weights and KV cache."""


def as_mapped(setting: WorkerSetting, placed: DeviceMapping) -> WorkerSetting:
    """On GPUs, with the mapper's micro-batch, offload and cache.

    What the manifest says itself stays; micro-batches only become smaller, so that they fit.
    """
    prediction = placed.prediction
    if placed.device == "CPU" or prediction is None:
        return setting
    job, mapped = setting.job, prediction.models[setting.role]
    training, rollout, data = job.spec.training, job.spec.rollout, job.spec.data
    tokens = mapped.micro_batch * (data.max_prompt_tokens + data.max_response_tokens)
    share = rollout.gpu_memory_utilization or min(prediction.gpu_memory_utilization + ENGINE_SHARE, 0.95)
    spec = job.spec.model_copy(
        update={
            "training": training.model_copy(update={"micro_batch_tokens": min(training.micro_batch_tokens, tokens)}),
            "rollout": rollout.model_copy(update={"gpu_memory_utilization": share}),
        }
    )
    offload = mapped.offload if setting.model.offload == "None" else setting.model.offload
    return replace(
        setting,
        job=job.model_copy(update={"spec": spec}),
        model=setting.model.model_copy(update={"offload": offload}),
    )
