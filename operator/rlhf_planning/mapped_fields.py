"""Fields of a manifest as the mapper fills them in on GPUs; what the manifest says itself stays."""

from __future__ import annotations

from collections.abc import Iterable

from rlhf_api.job import Job
from rlhf_api.spec.job_spec import MICRO_BATCH_TOKENS
from rlhf_mapper.mapping import ModelPrediction, Prediction

ENGINE_SHARE, MOST_SHARE = 0.05, 0.95
"""Of a GPU's memory: what the generator needs besides its weights and KV cache, and the most that it may take."""


def gpu_memory_utilization(job: Job, prediction: Prediction) -> float | None:
    """The share of a GPU's memory for generation; None for a job that does not generate on its own GPUs."""
    if job.spec.algorithm.offline or job.generates_elsewhere or job.spec.rollout.gpu_memory_utilization:
        return job.spec.rollout.gpu_memory_utilization
    return min(prediction.gpu_memory_utilization + ENGINE_SHARE, MOST_SHARE)


def micro_batch_tokens(job: Job, models: Iterable[ModelPrediction]) -> int:
    """Tokens of a forward pass for which each of the models has room; never more than the job says."""
    sequence = job.spec.data.max_prompt_tokens + job.spec.data.max_response_tokens
    fewest = min(model.micro_batch for model in models)
    return min(job.spec.training.micro_batch_tokens or MICRO_BATCH_TOKENS, max(fewest * sequence, 1))
