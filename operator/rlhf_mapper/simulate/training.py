"""Seconds of training and of forward passes (inference) with the parallel sizes p-t-d."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rlhf_mapper.kernels import Collective, Numbers, collective_seconds
from rlhf_mapper.simulate.layouts import Layouts, ring
from rlhf_mapper.simulate.passes import Passes
from rlhf_mapper.workload import Work, Workload

BACKWARD_OVER_FORWARD, BESIDE_FROZEN = 2.0, 1.0
"""FLOPs of a backward pass / FLOPs of a forward pass, without and with LoRA; frozen weights need no gradients."""
OPTIMIZER_BYTES = 34.0
"""Bytes that Adam reads and writes for a parameter: gradient, master weight, moments, and the rounded weight."""

COMPRESSED = 36 / 1024
"""Bytes of a compressed step over those of whole float32 gradients (`gradientCompression: TopK`)."""
ROUNDING = 1e-9
"""Excess of a quotient over a whole number that is a rounding error."""
Simulator = Callable[[Passes, Work, Workload, Layouts, Numbers], Numbers]


def training_seconds(passes: Passes, work: Work, load: Workload, layouts: Layouts, micro_batch: Numbers) -> Numbers:
    """Return the seconds of all updates of a model in a step; micro_batch: most sequences of a micro-batch."""
    if not work.trained:
        return np.zeros_like(layouts.gpus)
    count, one, backward = micro_batches(passes, work, load, layouts, micro_batch)
    filled = (count + layouts.p - 1) * one
    update = filled + _synchronised(passes, work, layouts, backward) + _optimizer(passes, work, layouts)
    update = update + _between_replicas(passes, work, layouts)
    return work.updates * (update + passes.software.efficiency.update_seconds)


def micro_batches(
    passes: Passes, work: Work, load: Workload, layouts: Layouts, micro_batch: Numbers
) -> tuple[Numbers, Numbers, Numbers]:
    """Return (micro-batches of an update, seconds of one in a stage, seconds of its backward pass alone)."""
    count, size = _packed(np.ceil(work.trained / work.updates / layouts.d), micro_batch, layouts)
    tokens = _computed_tokens(load, size, work.trained_together)
    forwards = 1.0 + bool(work.recomputes)
    backwards = BACKWARD_OVER_FORWARD if work.trained_share == 1 else BESIDE_FROZEN
    busy = passes.balance(load)
    own = size * tokens / layouts.c
    layers, head = passes.layers(layouts, size, tokens) / busy, passes.head(layouts, own) / busy
    backward = backwards * (layers + head)
    compute = forwards * layers + head + backward  # the head is never recomputed
    exchanges = _exchanges(passes, layouts, own) * (forwards + 1)
    one = np.maximum(compute, _gathered_and_scattered(passes, work, layouts)) + exchanges
    return count, one + 2 * passes.between_stages(layouts, own), backward


def inference_seconds(passes: Passes, work: Work, load: Workload, layouts: Layouts, micro_batch: Numbers) -> Numbers:
    """Return the seconds of a model's forward passes in a step, without those of its updates; see training_seconds."""
    if not work.read:
        return np.zeros_like(layouts.gpus)
    count, size = _packed(np.ceil(work.read / layouts.d), micro_batch, layouts)
    tokens = _computed_tokens(load, size, work.read_together)
    program, own = passes.software.efficiency, size * tokens / layouts.c
    forward = replace(passes, software=replace(passes.software, efficiency=replace(program, kernel=program.scoring)))
    work_seconds = forward.compute(layouts, size, tokens) / passes.balance(load)
    compute = np.maximum(work_seconds, _gathered(passes, work, layouts))
    one = compute + _exchanges(passes, layouts, own) + passes.between_stages(layouts, own)
    return (count + layouts.p - 1) * one + program.call_seconds


def _exchanges(passes: Passes, layouts: Layouts, tokens: Numbers) -> Numbers:
    """Return the seconds in which the ranks of a stage exchange activations in a forward pass; tokens: of a rank."""
    reduces = passes.tensor_parallel(layouts, tokens)
    return reduces + passes.between_experts(layouts, tokens) + passes.between_context(layouts, tokens)


def _packed(rows: Numbers, most: Numbers, layouts: Layouts) -> tuple[Numbers, Numbers]:
    """Return (number of micro-batches of a rank, mean sequences of each), all about equally full, as the trainer packs.

    rows: sequences of the rank; most: sequences that a micro-batch holds. A pipeline has one for each stage at least.
    """
    count = np.maximum(np.ceil(rows / most - ROUNDING), layouts.p)
    return count, np.maximum(rows / count, 1.0)


def _computed_tokens(load: Workload, sequences: Numbers, together: int) -> Numbers:
    """Return the tokens to compute for each sequence of a micro-batch; a shared prompt is computed once."""
    return load.prompt.mean / np.minimum(sequences, together) + load.response.mean


def _collectives(passes: Passes, work: Work, every: Layouts, bytes_: float, kind: Collective) -> Numbers:
    """Return the seconds of one collective for each layer among the FSDP ranks of a copy; bytes_: of each parameter.

    The experts of a layer are gathered apart, since other ranks have their shards.
    """
    layouts = replace(every, d=every.d / work.replicas)
    model, experts = passes.model, layouts.of_experts
    of_experts = (model.layers - model.dense[0]) * model.expert_parameters
    whole = (model.parameters - of_experts) / (layouts.p * layouts.t) * bytes_
    seconds = _collective(passes, work, layouts, whole, kind)
    if not of_experts:
        return seconds
    return seconds + _collective(passes, work, experts, of_experts / (experts.p * experts.t) * bytes_, kind)


def _collective(passes: Passes, work: Work, layouts: Layouts, whole: Numbers, kind: Collective) -> Numbers:
    """Return the seconds of a collective of `whole` bytes, one for each layer, among the FSDP ranks.

    In a node they are measured. Between nodes a ring passes each node once, with its latency.
    """
    nodes, count, shards = passes.nodes, passes.stage_layers(layouts), layouts.shards
    seconds = ring(shards) * whole / passes.network.of_data_ranks(layouts, work.replicas)
    if not passes.is_measured:
        return seconds
    spanned = layouts.gpus / nodes.gpus_per_node
    across = seconds + count * spanned * nodes.node_latency
    inside = count * collective_seconds(nodes.link, kind).at(shards, whole / count)
    return np.where(shards == 1, 0.0, np.where(spanned <= 1, inside, across))


def _gathered(passes: Passes, work: Work, layouts: Layouts) -> Numbers:
    """Return the seconds of FSDP's all-gather of weights for a pass of one micro-batch; computation may hide them."""
    if not passes.software.shards_weights:
        return np.zeros_like(layouts.gpus)
    gathered = _collectives(passes, work, layouts, passes.software.compute_bytes, "all_gather")
    return gathered + passes.to_or_from_host(layouts, passes.software.weight_bytes) * work.steps_in_host


def _gathered_and_scattered(passes: Passes, work: Work, layouts: Layouts) -> Numbers:
    """Return the seconds of FSDP's all-gathers for forward and backward pass, and of its gradient reduce-scatter."""
    if not passes.software.shards_weights:
        return np.zeros_like(layouts.gpus)
    trained = passes.software.gradient_bytes * work.trained_share
    scattered = _collectives(passes, work, layouts, trained, "reduce_scatter")
    back = passes.to_or_from_host(layouts, trained) * work.steps_in_host
    return 2 * _gathered(passes, work, layouts) + scattered + back


def _synchronised(passes: Passes, work: Work, layouts: Layouts, backward: Numbers) -> Numbers:
    """Return the seconds to reduce-scatter gradients and all-gather new weights once a mini-batch; 0 with FSDP.

    The reduce-scatter hides behind the backward pass of the last micro-batch.
    """
    software = passes.software
    if software.shards_weights:
        return np.zeros_like(layouts.gpus)
    of_a_shard = passes.model.parameters / (layouts.p * layouts.t)
    shares = ring(layouts.shards) * work.trained_share * of_a_shard / passes.network.of_data_ranks(layouts)
    return np.maximum(shares * software.gradient_bytes - backward, 0.0) + shares * software.weight_bytes


def _between_replicas(passes: Passes, work: Work, layouts: Layouts) -> Numbers:
    """Return the seconds in which copies of the weights (HSDP) exchange gradients, or compressed steps, in an update.

    Without other copies they are 0. Each rank exchanges its shard, by a ring of all-reduce or, compressed, by a ring of
    all-gather.
    """
    of_a_shard = passes.model.parameters * work.replicas / layouts.gpus * work.trained_share
    others, compresses = work.replicas - 1, work.compresses(over_thin_link=passes.nodes.has_thin_link)
    sent = COMPRESSED * others if compresses else 2 * others / work.replicas
    seconds: Numbers = sent * of_a_shard * passes.software.gradient_bytes / passes.network.of(layouts.gpus)
    return seconds


def _optimizer(passes: Passes, work: Work, layouts: Layouts) -> Numbers:
    """Return the seconds of an optimizer step: on the GPU, or on the host at the speed of the link to the GPU."""
    of_a_parameter = OPTIMIZER_BYTES * work.trained_share
    if work.steps_in_host:
        return passes.to_or_from_host(layouts, of_a_parameter)
    return passes.model.parameters / layouts.gpus * of_a_parameter / passes.memory_bandwidth
