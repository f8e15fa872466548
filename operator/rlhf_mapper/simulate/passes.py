"""Seconds of a micro-batch through one pipeline stage: its products, its layers, and the tensor-parallel all-reduces.

After llm-analysis (github:cli99/llm-analysis), which HybridFlow cites for its simulators (section 6).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import Layers, Software
from rlhf_mapper.hardware import Gpu, NodeGroup
from rlhf_mapper.kernels import Numbers, Table, collective_seconds, nearest, product_seconds
from rlhf_mapper.simulate import layer
from rlhf_mapper.simulate.layouts import Layouts, Network, ring
from rlhf_mapper.workload import Workload

SHARDS: Numbers = np.exp2(np.arange(8.0))[:, None]
ROWS: Numbers = np.exp2(np.arange(21.0))
"""Tensor-parallel ranks [8, 1] and tokens [21] for which the products of a layer are added up once for a model."""

GRAPH_KERNELS, GRAPH_SECONDS = 5, 2e-6
"""Kernels of a layer besides products and attention in a decode step (norms, rotary embedding, cache, MLP), and the
seconds of one in a CUDA graph."""
TOUCHES_OF_A_LOGIT: Mapping[Layers, float] = {"Plain": 12.7, "Fused": 4.7, "Megatron": 6.0}
"""Number of times that a logit is read or written in float32 in a forward pass, by kind of kernels.

These numbers are a third of those that docs/performance.md counts for an update. For Megatron, and for a roofline, a
softmax and a log-probability are counted.
"""


@cache
def attention_products(model: Architecture, gpu: Gpu) -> Table:
    """Return the seconds of a layer's attention matrices on one of t tensor-parallel ranks, by (t, tokens)."""
    queries, keys = (heads * model.head_size for heads in (model.heads, model.kv_heads))
    joined = queries / SHARDS + 2 * np.maximum(keys / SHARDS, model.head_size)
    seconds = product_seconds(gpu, ROWS, joined, np.array(float(model.hidden)))
    return Table(np.log2(seconds + product_seconds(gpu, ROWS, np.array(float(model.hidden)), queries / SHARDS)), (0, 0))


@cache
def layer_products(model: Architecture, gpu: Gpu) -> Table:
    """Return the seconds of a layer's products on one of t ranks, by (t, tokens); experts are cut along their width."""
    seconds = np.exp2(attention_products(model, gpu).logs)
    if model.experts > 1:
        return Table(np.log2(seconds + np.exp2(expert_products(model, gpu).logs)), (0, 0))
    wide = sum(width for _, width in model.mlp[:-1]) * model.ffn / SHARDS
    mlp = product_seconds(gpu, ROWS, wide, np.array(float(model.hidden)))
    mlp = mlp + product_seconds(gpu, ROWS, np.array(float(model.hidden)), model.ffn / SHARDS)
    return Table(np.log2(seconds + mlp), (0, 0))


@cache
def expert_products(model: Architecture, gpu: Gpu) -> Table:
    """Return the seconds of a mixture's experts by (t, tokens), each cut along its width over all ranks."""
    active = model.experts * (1 - (1 - model.experts_per_token / model.experts) ** ROWS)
    one = model.mlp_parameters / SHARDS
    flops, read = 2 * ROWS * model.experts_per_token * one, 2 * active * one
    roofline = np.maximum(flops / gpu.bf16, read / gpu.memory_bandwidth)
    return Table(np.log2(roofline / nearest(gpu).tables["experts"].at(ROWS, model.ffn / SHARDS)), (0, 0))


def expert_part(model: Architecture, gpu: Gpu, tokens: Numbers, parts: Numbers | float) -> Numbers:
    """Return the seconds of a rank that computes one of `parts` parts of a layer's experts, for `parts` ranks.

    tokens: of each rank, which sends them to the ranks of their experts.
    """
    of_all = tokens * parts
    beyond = np.maximum(of_all / ROWS[-1], 1.0)  # beyond the table seconds grow with the rows
    seconds: Numbers = beyond * expert_products(model, gpu).at(1.0, of_all) / parts
    return seconds


@cache
def head_product(model: Architecture, gpu: Gpu) -> Table:
    """Return the seconds of the output head's matrix product on one of t tensor-parallel ranks, by (t, tokens)."""
    columns = np.maximum(model.head_parameters / model.hidden / SHARDS, 1.0)
    return Table(np.log2(product_seconds(gpu, ROWS, columns, np.array(float(model.hidden)))), (0, 0))


@cache
def decode_products(model: Architecture, gpu: Gpu, link: float, memory_bandwidth: float) -> Table:
    """Return the seconds of a decode step's kernels and all-reduces without attention, by (t, sequences)."""
    reduced = collective_seconds(link, "custom").at(SHARDS, 2 * ROWS * model.hidden) * (SHARDS > 1)
    of_layers = layer_products(model, gpu).at(SHARDS, ROWS) + 2 * reduced + GRAPH_KERNELS * GRAPH_SECONDS
    logits = 4 * ROWS * model.vocabulary / SHARDS * TOUCHES_OF_A_LOGIT["Fused"] / memory_bandwidth
    return Table(np.log2(model.layers * of_layers + head_product(model, gpu).at(SHARDS, ROWS) + logits), (0, 0))


def prefill_attention(
    model: Architecture, gpu: Gpu, t: Numbers, sequences: Numbers, tokens: Numbers | float
) -> Numbers:
    """Return the seconds of a layer's causal attention over whole sequences."""
    flops = 2 * sequences * tokens**2 * model.heads * model.head_size / t
    share = nearest(gpu).tables["prefill"].at(np.maximum(sequences * model.heads / t, 1.0), tokens)
    return flops / gpu.bf16 / share


def decode_attention(model: Architecture, gpu: Gpu, t: Numbers, sequences: Numbers, tokens: Numbers | float) -> Numbers:
    """Return the seconds of a layer's attention of one new token to each sequence of `tokens` tokens."""
    heads = np.maximum(model.kv_heads / t, 1.0)
    read = 2 * 2 * sequences * heads * model.head_size * tokens
    seconds: Numbers = read / gpu.memory_bandwidth / nearest(gpu).tables["decode"].at(sequences * heads, tokens)
    return seconds


@dataclass(frozen=True)
class Passes:
    """Simulator of the forward and backward passes of one model."""

    model: Architecture
    nodes: NodeGroup
    software: Software

    @property
    def network(self) -> Network:
        return Network(self.nodes, self.software.efficiency)

    @property
    def is_measured(self) -> bool:
        """Whether measured kernels tell the seconds of products, attention and collectives; they are of 16 bits."""
        return self.software.products == "Measured" and self.software.compute_bytes == layer.HALF

    @property
    def peak(self) -> float:
        """FLOP/s that large matrix products reach."""
        gpu = self.nodes.gpu
        return (gpu.fp32 if self.software.compute_bytes == 4 else gpu.bf16) * self.software.efficiency.kernel

    @property
    def memory_bandwidth(self) -> float:
        """Bytes/s of the GPU's memory that kernels reach."""
        return self.nodes.gpu.memory_bandwidth * self.software.efficiency.memory

    def balance(self, load: Workload) -> float:
        """Return the share of an update or a scoring pass that its kernels explain; 1 in a job without generation."""
        generates = any(work.generated for work in load.work.values())
        return self.software.efficiency.balance if generates else 1.0

    def to_or_from_host(self, layouts: Layouts, bytes_: float) -> Numbers:
        """Return the seconds to move `bytes_` bytes for each parameter of a GPU's shards to or from host memory."""
        return self.model.parameters / layouts.gpus * bytes_ / self.nodes.gpu.host_bandwidth

    def stage_layers(self, layouts: Layouts) -> Numbers:
        return np.ceil(self.model.layers / layouts.p)

    def compute(self, layouts: Layouts, sequences: Numbers, tokens: Numbers | float) -> Numbers:
        """Return the seconds of a forward pass through the slowest stage without communication; tokens: by sequence.

        Context-parallel ranks share the tokens of each sequence.
        """
        return self.layers(layouts, sequences, tokens) + self.head(layouts, sequences * tokens / layouts.c)

    def layers(self, layouts: Layouts, sequences: Numbers, tokens: Numbers | float) -> Numbers:
        """Return the seconds of a forward pass through the largest stage's layers, without communication."""
        return self.stage_layers(layouts) * self._layer(layouts, sequences, tokens)

    def tensor_parallel(self, layouts: Layouts, tokens: Numbers, *, generates: bool = False) -> Numbers:
        """Return the seconds of a stage's tensor-parallel communication: two all-reduces in each layer.

        generates: by vLLM's own all-reduce instead of NCCL's.
        """
        t, bytes_ = layouts.t, tokens * self.model.hidden * self.software.compute_bytes
        seconds = 2 * (t - 1) * self.network.latency(t) + 2 * ring(t) * bytes_ / self.network.of(t)
        if self.is_measured:
            measured = collective_seconds(self.nodes.link, "custom" if generates else "all_reduce").at(t, bytes_)
            seconds = np.where(t <= self.nodes.gpus_per_node, measured, seconds)
        both: Numbers = 2 * self.stage_layers(layouts) * np.where(t > 1, seconds, 0.0)
        return both

    def between_experts(self, layouts: Layouts, tokens: Numbers) -> Numbers:
        """Return the seconds of a stage's all-to-alls of experts: in each layer, tokens go to them and come back.

        tokens: of a micro-batch on a rank; its tensor-parallel ranks divide them.
        """
        if self.model.experts == 1 or layouts.e is None:
            return np.zeros_like(layouts.gpus)
        near = np.maximum(np.floor(self.nodes.gpus_per_node / layouts.p), np.minimum(layouts.t, layouts.e))
        routed = layouts.fullest * tokens / layouts.t * self.model.experts_per_token
        bytes_ = routed * self.model.hidden * self.software.compute_bytes
        return 2 * self.stage_layers(layouts) * self._exchange(layouts.e, near, bytes_)

    def between_context(self, layouts: Layouts, tokens: Numbers) -> Numbers:
        """Return the seconds of a stage's exchanges between context-parallel ranks, each with `tokens` tokens.

        In each layer queries, keys and values go to the ranks of their heads and outputs come back; or each rank gets
        the keys and values of all (`Layouts.copies`).
        """
        if np.all(layouts.c == 1):
            return np.zeros_like(layouts.gpus)
        model, copies = self.model, layouts.copies(self.model)
        keys = 2 * copies * model.kv_heads
        heads = np.where(layouts.gathers_keys(model), keys, 2 * model.heads + keys) * model.head_size / layouts.t
        near = np.floor(self.nodes.gpus_per_node / (layouts.p * layouts.t))
        bytes_ = tokens * heads * self.software.compute_bytes
        return self.stage_layers(layouts) * self._exchange(layouts.c, near, bytes_)

    def _exchange(self, ranks: Numbers | float, near: Numbers, bytes_: Numbers) -> Numbers:
        """Return the seconds of an all-to-all of `bytes_` bytes of each rank; near: ranks of a group in one node."""
        seconds = self.network.exchange(ranks, near, bytes_)
        if not self.is_measured:
            return seconds
        measured = collective_seconds(self.nodes.link, "alltoall").at(ranks, np.maximum(bytes_, 1.0))
        return np.where((near >= ranks) & np.greater(ranks, 1.0), measured, seconds)

    def between_stages(self, layouts: Layouts, tokens: Numbers) -> Numbers:
        """Return the seconds, with overhead, to send a micro-batch's hidden states to the next stage; 0 with one."""
        bytes_ = tokens * self.model.hidden * self.software.compute_bytes / layouts.t
        replica = layouts.p * layouts.t
        way = self.network.latency(replica) + bytes_ / self.network.of_neighbours(layouts)
        return np.where(layouts.p > 1, way + self.software.efficiency.stage_seconds, 0.0)

    def _layer(self, layouts: Layouts, sequences: Numbers, tokens: Numbers | float) -> Numbers:
        model, gpu, count = self.model, self.nodes.gpu, sequences * tokens / layouts.c
        slowest = np.where(layouts.gathers_keys(model), 2 - 1 / layouts.c, 1.0)  # the rank with the last tokens
        if self.is_measured:
            products = self._products(layouts, count)
            products = products + slowest * prefill_attention(model, gpu, layouts.t * layouts.c, sequences, tokens)
            products = products / self.software.efficiency.kernel
        else:
            attention = slowest * 2 * 2 * count * tokens / 2 * model.heads * model.head_size  # half of the square
            flops = (2 * count * model.active_layer_parameters + attention) / layouts.t
            weights = layouts.layer_parameters(model) * self.software.compute_bytes
            products = np.maximum(flops / self.peak, weights / self.memory_bandwidth)
        moved = layer.moved(model, self.software).on(model, layouts) * count
        started = layer.kernels(model, self.software) * gpu.launch_seconds
        return np.maximum(products + moved / self.memory_bandwidth, started)

    def _products(self, layouts: Layouts, count: Numbers) -> Numbers:
        """Return the measured seconds of a layer's matrix products for `count` tokens of a rank."""
        if self.model.experts == 1 or layouts.e is None:
            return layer_products(self.model, self.nodes.gpu).at(layouts.t, count)
        own = layouts.fullest * count / layouts.t
        experts = expert_part(self.model, self.nodes.gpu, own, layouts.e)
        return attention_products(self.model, self.nodes.gpu).at(layouts.t, count) + experts

    def head(self, layouts: Layouts, count: Numbers) -> Numbers:
        """Return the seconds of the output head on `count` tokens in the last stage; logits are in float32."""
        logits = count * (1 if self.model.scores else self.model.vocabulary) / layouts.t
        product, touches = 2 * logits * self.model.hidden / self.peak, TOUCHES_OF_A_LOGIT["Megatron"]
        if self.is_measured:
            touches = TOUCHES_OF_A_LOGIT[self.software.layers]
            product = head_product(self.model, self.nodes.gpu).at(layouts.t, count) / self.software.efficiency.kernel
        return product + touches * 4 * logits / self.memory_bandwidth
