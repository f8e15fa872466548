"""Seconds of generation in p_g-t_g, and of the transition to it from the training layout.

Generation is prefill, then decode steps bound by memory, in the waves that the cache allows. The transition is that of
HybridFlow, section 5 and Table 2.
"""

from __future__ import annotations

import numpy as np

from rlhf_mapper.simulate.layouts import Layouts, Numbers
from rlhf_mapper.simulate.passes import KERNELS_OF_A_LAYER, Passes
from rlhf_mapper.workload import Work, Workload


def weights_of_gpu(passes: Passes, generator: Layouts) -> Numbers:
    """Bytes of the generation shard, M / (t_g p_g)."""
    return passes.model.parameters * passes.software.compute_bytes / (generator.t * generator.p)


def cached_bytes(passes: Passes, generator: Layouts, tokens: float) -> Numbers:
    """Bytes of a GPU for the KV cache of one sequence; heads are copied where there are fewer than t_g."""
    shards = np.minimum(generator.t, passes.model.kv_heads) * generator.p
    return passes.model.kv_values * passes.software.compute_bytes * tokens / shards


def running(passes: Passes, load: Workload, generator: Layouts, cache: Numbers) -> Numbers:
    """Sequences that a generator decodes at once with so many bytes of cache on each of its GPUs."""
    most = np.floor(cache / cached_bytes(passes, generator, load.most_tokens))
    return np.clip(most, 0, passes.software.running_sequences)


def generation_seconds(passes: Passes, work: Work, load: Workload, generator: Layouts, cache: Numbers) -> Numbers:
    """Of all generation passes of a step; d of a generator layout counts its replicas. inf: not one sequence fits."""
    of_a_replica = np.ceil(work.generated / work.passes / generator.d)
    at_once = np.minimum(running(passes, load, generator, cache), of_a_replica)
    with np.errstate(divide="ignore", invalid="ignore"):
        waves = np.ceil(of_a_replica / at_once)
        seconds = _prefill(passes, load, generator, of_a_replica) + waves * load.response.longest * _step(
            passes, generator, at_once
        )
        seconds = seconds + of_a_replica * load.response.mean * _sequence(passes, load, generator)
    return np.where(at_once >= 1, work.passes * seconds, np.inf)


def _prefill(passes: Passes, load: Workload, generator: Layouts, sequences: Numbers) -> Numbers:
    """All prompts; only the last token of each meets the output head."""
    read = passes.layers(generator, sequences, load.prompt.mean) + passes.head(generator, sequences)
    return generator.p * (read + passes.tensor_parallel(generator, sequences * load.prompt.mean))


def _step(passes: Passes, generator: Layouts, at_once: Numbers) -> Numbers:
    """What a decode step takes whatever the lengths: weights, all-reduces, kernel starts and the generator's code."""
    model, software = passes.model, passes.software
    weights = weights_of_gpu(passes, generator) / passes.memory_bandwidth
    multiplied = model.active_layer_parameters * model.layers + model.head_parameters
    flops = 2 * at_once * multiplied / generator.t / passes.peak
    started = model.layers * KERNELS_OF_A_LAYER * passes.nodes.gpu.launch_seconds
    stages = np.maximum(np.maximum(generator.p * weights, flops), started)
    reduces = generator.p * passes.tensor_parallel(generator, at_once)
    own = software.efficiency.decode_seconds + software.efficiency.sequence_seconds * at_once
    seconds: Numbers = stages + reduces + own
    return seconds


def _sequence(passes: Passes, load: Workload, generator: Layouts) -> Numbers:
    """Reading the KV cache of one sequence in an average decode step."""
    model = passes.model
    copies = model.heads / model.kv_heads if passes.software.rereads_kv else 1.0
    length = load.prompt.mean + load.response.mean / 2
    bytes_ = cached_bytes(passes, generator, length) * generator.p * copies
    return bytes_ / passes.memory_bandwidth


def received_bytes(passes: Passes, training: Layouts, generator: Layouts) -> Numbers:
    """Bytes that a GPU receives: its generation shard less the part of it that it trains."""
    whole = passes.model.parameters * passes.software.compute_bytes
    own = training.gpus if passes.software.shards_weights else training.p * training.t
    return np.maximum(weights_of_gpu(passes, generator) - whole / own, 0.0)


def transition_seconds(passes: Passes, training: Layouts, generator: Layouts) -> Numbers:
    """Seconds of a transition; the way back moves nothing."""
    span = training.gpus if passes.software.shards_weights else training.p * training.t
    moved = received_bytes(passes, training, generator)
    return moved / passes.network.of(span) + passes.software.efficiency.transition_seconds
