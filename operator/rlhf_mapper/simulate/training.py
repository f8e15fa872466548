"""Seconds of training and of forward passes (inference) in p-t-d."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlhf_mapper.simulate.layouts import Layouts, Numbers, ring
from rlhf_mapper.simulate.passes import Passes
from rlhf_mapper.workload import Work, Workload

BACKWARD_OVER_FORWARD, BESIDE_FROZEN = 2.0, 1.0
"""FLOPs; of an adapter alone: those of the weights' own gradients are left out."""
OPTIMIZER_BYTES = 34.0
"""Bytes that Adam reads and writes for a parameter: gradient, master weight, moments, and the rounded weight."""


Simulator = Callable[[Passes, Work, Workload, Layouts, Numbers], Numbers]


def training_seconds(passes: Passes, work: Work, load: Workload, layouts: Layouts, micro_batch: Numbers) -> Numbers:
    """Seconds of all mini-batch updates of a step, with micro-batches of `micro_batch` sequences."""
    if not work.trained:
        return np.zeros_like(layouts.gpus)
    of_a_rank = np.ceil(work.trained / work.updates / layouts.d)
    size = np.minimum(micro_batch, of_a_rank)
    tokens = _computed_tokens(load, size, work.trained_together)
    count = np.ceil(of_a_rank / size)
    forwards = 1.0 + bool(work.recomputes)
    backwards = BACKWARD_OVER_FORWARD if work.trained_share == 1 else BESIDE_FROZEN
    compute = passes.compute(layouts, size, tokens) * (forwards + backwards)
    reduces = passes.tensor_parallel(layouts, size * tokens) * (forwards + 1)
    one = np.maximum(compute, _gathered_and_scattered(passes, work, layouts)) + reduces
    one = one + 2 * passes.between_stages(layouts, size * tokens)
    filled = (count + layouts.p - 1) * one
    backward = backwards * passes.compute(layouts, size, tokens)
    update = filled + _synchronised(passes, work, layouts, backward) + _optimizer(passes, work, layouts)
    seconds: Numbers = work.updates * (update + passes.software.efficiency.update_seconds)
    return seconds


def inference_seconds(passes: Passes, work: Work, load: Workload, layouts: Layouts, micro_batch: Numbers) -> Numbers:
    """Seconds of the forward passes of a step."""
    if not work.read:
        return np.zeros_like(layouts.gpus)
    of_a_rank = np.ceil(work.read / layouts.d)
    size = np.minimum(micro_batch, of_a_rank)
    tokens = _computed_tokens(load, size, work.read_together)
    count = np.ceil(of_a_rank / size)
    compute = np.maximum(passes.compute(layouts, size, tokens), _gathered(passes, work, layouts))
    one = compute + passes.tensor_parallel(layouts, size * tokens) + passes.between_stages(layouts, size * tokens)
    seconds: Numbers = (count + layouts.p - 1) * one + passes.software.efficiency.call_seconds
    return seconds


def _computed_tokens(load: Workload, sequences: Numbers, together: int) -> Numbers:
    """Tokens to compute for each sequence of a micro-batch; sequences with one prompt compute the prompt once."""
    tokens: Numbers = load.prompt.mean / np.minimum(sequences, together) + load.response.mean
    return tokens


def _shard_parameters(passes: Passes, layouts: Layouts) -> Numbers:
    """Parameters of a stage's tensor-parallel shard."""
    return passes.model.parameters / (layouts.p * layouts.t)


def _gathered(passes: Passes, work: Work, layouts: Layouts) -> Numbers:
    """FSDP's all-gather of the weights for a pass of one micro-batch, which hides behind the computation."""
    if not passes.software.shards_weights:
        return np.zeros_like(layouts.gpus)
    bytes_ = _shard_parameters(passes, layouts) * passes.software.compute_bytes
    gathered = ring(layouts.d) * bytes_ / passes.network.of_data_ranks(layouts)
    return gathered + passes.to_or_from_host(layouts, passes.software.weight_bytes) * work.steps_in_host


def _gathered_and_scattered(passes: Passes, work: Work, layouts: Layouts) -> Numbers:
    """FSDP's all-gathers for the forward and the backward pass, and its reduce-scatter of the gradients."""
    if not passes.software.shards_weights:
        return np.zeros_like(layouts.gpus)
    trained = passes.software.gradient_bytes * work.trained_share
    gradients = _shard_parameters(passes, layouts) * trained
    scattered = ring(layouts.d) * gradients / passes.network.of_data_ranks(layouts)
    back = passes.to_or_from_host(layouts, trained) * work.steps_in_host
    return 2 * _gathered(passes, work, layouts) + scattered + back


def _synchronised(passes: Passes, work: Work, layouts: Layouts, backward: Numbers) -> Numbers:
    """Once a mini-batch where replicas are whole: the gradients' reduce-scatter and the new weights' all-gather.

    The reduce-scatter hides behind the backward pass of the last micro-batch.
    """
    software = passes.software
    if software.shards_weights:
        return np.zeros_like(layouts.gpus)
    shares = (
        ring(layouts.d)
        * work.trained_share
        * _shard_parameters(passes, layouts)
        / passes.network.of_data_ranks(layouts)
    )
    return np.maximum(shares * software.gradient_bytes - backward, 0.0) + shares * software.weight_bytes


def _optimizer(passes: Passes, work: Work, layouts: Layouts) -> Numbers:
    """Seconds of the optimizer: on the GPU, or on the host at the speed of the link to the GPU."""
    of_a_parameter = OPTIMIZER_BYTES * work.trained_share
    if work.steps_in_host:
        return passes.to_or_from_host(layouts, of_a_parameter)
    return passes.model.parameters / layouts.gpus * of_a_parameter / passes.memory_bandwidth
