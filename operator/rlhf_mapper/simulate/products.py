"""Seconds of a model's matrix products and attention, from measured kernels or from a roofline."""

from collections.abc import Mapping
from functools import cache

import numpy as np

from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import Layers
from rlhf_mapper.hardware import Gpu
from rlhf_mapper.kernels import Numbers, Table, collective_seconds, nearest, product_seconds

SHARDS: Numbers = np.exp2(np.arange(8.0))[:, None]
ROWS: Numbers = np.exp2(np.arange(21.0))
"""Tensor-parallel ranks [8, 1] and tokens [21] for which the products of a layer are added up once for a model."""

GRAPH_KERNELS, GRAPH_SECONDS = 5, 2e-6
"""Kernels of a layer besides products and attention in a decode step (norms, rotary embedding, cache, MLP), and the
seconds of one in a CUDA graph."""
TOUCHES_OF_A_LOGIT: Mapping[Layers, float] = {"Plain": 12.7, "Fused": 4.7, "Megatron": 6.0}
"""Number of times that a logit is read or written in float32 in a forward pass, by kind of kernels.

A third of what docs/performance.md counts for an update. Megatron's, and those of a roofline, are a softmax and a
log-probability.
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
    """Return the seconds of a layer's matrix products on one of t tensor-parallel ranks, by (t, tokens).

    Experts are cut along their width.
    """
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
    """Return the seconds of one of `parts` parts of a layer's experts with the tokens of `parts` ranks.

    tokens: of a rank. Each rank has them routed to all experts, and computes a part of the experts for all ranks.
    """
    of_all = tokens * parts
    beyond = np.maximum(of_all / ROWS[-1], 1.0)  # products are as long as they have rows there
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
    seconds: Numbers = flops / gpu.bf16 / share
    return seconds


def decode_attention(model: Architecture, gpu: Gpu, t: Numbers, sequences: Numbers, tokens: float) -> Numbers:
    """Return the seconds of a layer's attention of one new token to each sequence of `tokens` tokens."""
    heads = np.maximum(model.kv_heads / t, 1.0)
    read = 2 * 2 * sequences * heads * model.head_size * tokens
    seconds: Numbers = read / gpu.memory_bandwidth / nearest(gpu).tables["decode"].at(sequences * heads, tokens)
    return seconds
