"""Fields that the mapper fills into a manifest on GPUs; a value that the manifest sets is kept."""

from collections.abc import Iterable

from rlhf_api.job import Job
from rlhf_api.spec.job_spec import MICRO_BATCH_TOKENS
from rlhf_mapper.mapping import ModelPrediction, Prediction

ENGINE_SHARE, MAX_SHARE = 0.05, 0.95
"""Shares of a GPU's memory: the generator's need besides weights and KV cache, and the most it may take in all."""


def gpu_memory_utilization(job: Job, prediction: Prediction) -> float | None:
    """Return the share of a GPU's memory for generation; None for a job that does not generate on its own GPUs."""
    if job.spec.algorithm.offline or job.generates_elsewhere or job.spec.rollout.gpu_memory_utilization:
        return job.spec.rollout.gpu_memory_utilization
    return min(prediction.gpu_memory_utilization + ENGINE_SHARE, MAX_SHARE)


def micro_batch_tokens(job: Job, models: Iterable[ModelPrediction]) -> int:
    """Return the most tokens of a forward pass that fit in memory for every model, at most those of the manifest."""
    sequence = job.spec.data.max_prompt_tokens + job.spec.data.max_response_tokens
    fewest = min(model.micro_batch for model in models)
    return min(job.spec.training.micro_batch_tokens or MICRO_BATCH_TOKENS, max(fewest * sequence, 1))
