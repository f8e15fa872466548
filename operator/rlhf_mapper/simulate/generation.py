"""Seconds of generation with the layout p_g-t_g, and of the transition from the training layout to this layout.

Generation is prefill, then decode steps bound by memory bandwidth. A step decodes as many sequences as the KV cache
holds, and at the end those that still run. The transition is that of HybridFlow, section 5 and Table 2.
"""

from dataclasses import replace

import numpy as np

from rlhf_mapper.kernels import Numbers
from rlhf_mapper.simulate.layer import FUSED_KERNELS
from rlhf_mapper.simulate.layouts import Layouts
from rlhf_mapper.simulate.passes import Passes, decode_attention, decode_products, layer_products
from rlhf_mapper.workload import Work, Workload


def weights_of_gpu(passes: Passes, generator: Layouts) -> Numbers:
    """Return the bytes of a GPU's shard of the weights in generation: bytes of the model / (t_g p_g).

    Embedding, head and norms are not quantised; scales of rows, below 0.2 % of a large layer, are not counted.
    """
    saved = passes.model.layers * passes.model.active_layer_parameters * (1 - _linear_share(passes))
    return (passes.model.parameters - saved) * passes.software.compute_bytes / (generator.t * generator.p)


def sent_to_gpu(passes: Passes, generator: Layouts) -> Numbers:
    """Return the bytes of a GPU's shard of the weights as they are sent: before they are quantised."""
    return passes.model.parameters * passes.software.compute_bytes / (generator.t * generator.p)


def _linear_share(passes: Passes) -> float:
    """Return the bytes of a weight of the generator's linear layers over those of an unquantised one."""
    return (passes.software.linear_bytes or passes.software.compute_bytes) / passes.software.compute_bytes


def _cache_bytes(passes: Passes) -> float:
    return passes.software.cache_bytes or passes.software.compute_bytes


def cached_bytes(passes: Passes, generator: Layouts, tokens: Numbers | float) -> Numbers:
    """Return the bytes of a GPU for the KV cache of one sequence; KV heads are copied if there are fewer than t_g."""
    model, shards = passes.model, np.minimum(generator.t, passes.model.kv_heads) * generator.p
    return 2 * model.layers * model.kv_heads * model.head_size * _cache_bytes(passes) * tokens / shards


def running(passes: Passes, load: Workload, generator: Layouts, cache: Numbers) -> Numbers:
    """Return how many sequences a generator decodes at once with `cache` bytes of KV cache on each of its GPUs.

    The cache grows by blocks with each sequence, but the longest one has to fit.
    """
    most = np.floor(cache / cached_bytes(passes, generator, load.held_tokens))
    fits = cache >= cached_bytes(passes, generator, load.most_tokens)
    return np.where(fits, np.clip(most, 1, passes.software.running_sequences), 0.0)


def generation_seconds(passes: Passes, work: Work, load: Workload, generator: Layouts, cache: Numbers) -> Numbers:
    """Return the seconds of a step's generation passes; inf if no sequence fits. generator.d: number of generators.

    A sequence that ends makes room for the next one. So all waves but the last are full, and the last one shrinks.
    """
    of_a_replica = np.ceil(work.generated / work.passes / generator.d)
    at_once = np.minimum(running(passes, load, generator, cache), of_a_replica)
    fits, at_once = at_once >= 1, np.maximum(at_once, 1)
    full = np.ceil(of_a_replica / at_once) - 1
    last = of_a_replica - full * at_once
    seconds = prefill_seconds(passes, load, generator, of_a_replica) + _last_wave(passes, load, generator, last)
    usual = load.prompt.mean + load.response.mean_square / (2 * load.response.mean)
    seconds = seconds + full * load.response.mean * decode_step(passes, generator, at_once, usual)
    return np.where(fits, work.passes * seconds / passes.software.efficiency.rollout, np.inf)


def _last_wave(passes: Passes, load: Workload, generator: Layouts, count: Numbers) -> Numbers:
    """Return the seconds of all decode steps of `count` sequences that start together and end one after the other.

    If each of n sequences is still running with probability s, at least one is with probability 1 - (1 - s)^n. All
    replicas wait for the longest sequence, whose replica runs alone at the end.
    """
    tokens, share = np.array(load.response.still_running).T.reshape(2, -1, *(1,) * count.ndim)
    before = np.concatenate([0 * tokens[:1], tokens[:-1]])
    here, anywhere = (1 - (1 - share) ** number for number in (count, count * generator.d))
    context = load.prompt.mean + (before + tokens) / 2
    step = decode_step(passes, generator, count * share / here, context)
    seconds: Numbers = ((tokens - before) * anywhere * step).sum(axis=0)
    return seconds


def prefill_seconds(passes: Passes, load: Workload, generator: Layouts, sequences: Numbers) -> Numbers:
    """Return the seconds to prefill all prompts with fused kernels; the head computes only each prompt's last token."""
    own = passes.software.efficiency
    program = replace(passes.software, layers="Megatron", efficiency=replace(own, kernel=own.prefill))
    fused = replace(passes, software=program)
    read = fused.layers(generator, sequences, load.prompt.mean) + fused.head(generator, sequences)
    reduces = fused.tensor_parallel(generator, sequences * load.prompt.mean, generates=True)
    return generator.p * (read + reduces)


def decode_step(passes: Passes, generator: Layouts, at_once: Numbers, context: Numbers | float) -> Numbers:
    """Return the seconds of a decode step of `at_once` sequences that have `context` tokens each.

    They cover weights, attention, all-reduces, kernel launches, and the generator's own code. Kernels of 8 bits
    were not measured: they take the seconds of 16 bits in proportion to the bytes that they read.
    """
    model, gpu, own = passes.model, passes.nodes.gpu, passes.software.efficiency
    if passes.is_measured:
        read = _cache_bytes(passes) / passes.software.compute_bytes
        stages = model.layers * decode_attention(model, gpu, generator.t, at_once, context) * read
        table = decode_products(model, gpu, passes.nodes.link, passes.memory_bandwidth)
        stages = stages + table.at(generator.t, at_once)
        if passes.software.linear_bytes:
            products = model.layers * layer_products(model, gpu).at(generator.t, at_once)
            stages = stages - (1 - _linear_share(passes)) * products
    else:
        weights = weights_of_gpu(passes, generator) / passes.memory_bandwidth
        multiplied = model.active_layer_parameters * model.layers + model.head_parameters
        flops = 2 * at_once * multiplied / generator.t / passes.peak
        started = model.layers * FUSED_KERNELS * gpu.launch_seconds
        stages = np.maximum(np.maximum(generator.p * weights, flops), started)
        copies = model.heads / model.kv_heads if passes.software.rereads_kv else 1.0
        cache = at_once * cached_bytes(passes, generator, context) * generator.p * copies
        stages = stages + cache / passes.memory_bandwidth + generator.p * passes.tensor_parallel(generator, at_once)
    return stages + own.decode_seconds + own.sequence_seconds * at_once


def received_bytes(passes: Passes, work: Work, training: Layouts, generator: Layouts) -> Numbers:
    """Return the bytes that a GPU receives in a transition: those of its generation shard less its training shard."""
    if work.receives_weights:
        return sent_to_gpu(passes, generator)
    whole = passes.model.parameters * passes.software.compute_bytes
    own = training.gpus if passes.software.shards_weights else training.p * training.t
    return np.maximum(sent_to_gpu(passes, generator) - whole / own, 0.0)


def transition_seconds(passes: Passes, work: Work, training: Layouts, generator: Layouts) -> Numbers:
    """Return a step's transition seconds; the way back moves nothing. Weights from another pool cross nodes."""
    span = training.gpus if passes.software.shards_weights else training.p * training.t
    reached = passes.network.between if work.receives_weights else passes.network.of(span)
    moved = received_bytes(passes, work, training, generator) / reached
    brought = passes.to_or_from_host(training, passes.software.weight_bytes) * work.steps_in_host
    return (moved + brought + passes.software.efficiency.transition_seconds) * (not work.keeps_generator)
