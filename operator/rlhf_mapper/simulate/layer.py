"""Costs of a decoder layer without its matrix products: bytes kept for the backward pass, bytes moved, and kernels.

The figures are those of transformers' own modules, where each operation is a kernel. `python -m tests.real_size.layer`
counts them on the meta device, and `tests/real_size/test_the_mapper_knows_what_a_step_holds.py` compares both.
"""

from dataclasses import dataclass
from typing import Any

from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import Software
from rlhf_mapper.kernels import Numbers
from rlhf_mapper.simulate.layouts import Layouts

FUSED_KERNELS, FUSED_TOUCHES = 12, 14
"""Numbers of kernels and of reads or writes of a hidden state, in a layer's forward pass in Megatron or vLLM."""
ROUTING_KERNELS = 16
"""Kernels of a mixture's layer beyond those of a dense one: router, order of the experts and back."""
FLOAT = 4
"""Bytes of a float32: norms compute in it, and attention keeps the logarithm of each head's sum."""
HALF = 2
"""Bytes of a number in bf16."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes of a token in a layer, as bytes per unit of each of the layer's widths (such as its hidden size)."""

    hidden: float
    """Bytes per unit of hidden size of all tokens on each tensor-parallel rank; other widths are cut over the ranks."""
    part: float = 0.0
    """Bytes per unit of hidden size of the tokens that a tensor-parallel rank holds between blocks."""
    ffn: float
    queries: float
    """Bytes per unit of heads x head size."""
    keys: float
    """Bytes per unit of KV heads x head size."""
    heads: float = 0.0
    routed: float = 0.0
    """Bytes per unit of experts of a token x hidden size: copies of hidden states in the order of the experts."""
    exchanged: float = 0.0
    """Further bytes per unit of the width of `routed`, if tokens go to the ranks of their experts and back."""

    def on(self, model: Architecture, layouts: Layouts) -> Numbers:
        """Return the bytes of a token of a layer on a rank of a layout."""
        apart = layouts.exchanges_tokens
        experts: Any = model.ffn * self.ffn
        if model.experts > 1:
            experts = (experts + model.hidden * (self.routed + self.exchanged * apart)) * layouts.fullest
        cut = (
            experts * model.experts_per_token
            + self.queries * model.heads * model.head_size
            + self.keys * layouts.copies(model) * model.kv_heads * model.head_size
            + self.heads * model.heads
        )
        found: Numbers = self.hidden * model.hidden + (self.part * model.hidden + cut) / layouts.t
        return found


def kept(model: Architecture, software: Software) -> Widths:
    """Return the bytes that a layer keeps of each token for its backward pass, by width.

    Eager layers keep: for a norm its input in float32, the normalised values and its output; in the MLP gate,
    silu(gate), up and their product; in attention queries, keys, values and output. Rotary embeddings keep nothing.
    SDPA copies the joined outputs of documents. Fused norms keep their input and output, and a fused MLP keeps gate, up
    and their product; rotary embeddings work in place. Experts keep inputs and outputs, and outputs from other ranks
    twice. Megatron's layers are those of Korthikanti et al. (arXiv 2205.05198, with flash attention: 34 h), with
    queries as wide as hidden states.
    """
    size = software.compute_bytes
    if software.layers == "Megatron":
        return Widths(hidden=5 * size, ffn=0.0, queries=12 * size, keys=0.0)
    is_fused = software.layers == "Fused"
    in_norm = 0 if is_fused else FLOAT
    own = in_norm + size if model.norms_heads else 0.0
    copied = size * (software.attention == "SDPA")
    return Widths(
        hidden=2 * size,
        part=2 * (in_norm + size),
        ffn=(3 if is_fused else 4) * size,
        queries=2 * size + copied + own,
        keys=2 * size + own,
        heads=FLOAT,
        routed=2 * size,
        exchanged=size,
    )


def moved(model: Architecture, software: Software) -> Widths:
    """Return the bytes that a forward pass reads and writes by token and width; products and attention do not count."""
    size = software.compute_bytes
    routed = {"routed": 6 * size, "exchanged": 10 * size}  # to the order of experts, weighted, back, added
    residuals = (6 + 2 * (model.experts > 1)) * size
    if software.layers == "Megatron":
        return Widths(hidden=FUSED_TOUCHES * size, ffn=0.0, queries=0.0, keys=0.0)
    if software.layers == "Fused":  # each kernel reads its inputs and writes its output once; two residuals
        own = 2 * size * model.norms_heads
        part, own = 2 * 2 * size + residuals, 2 * size + own
        return Widths(hidden=0.0, part=part, ffn=3 * size, queries=own, keys=own, **routed)
    norm = 28.0 + (8.0 if size == HALF else 0.0)  # to float32, square, mean, scale, back, times the weight
    own = norm if model.norms_heads else 0.0
    return Widths(
        hidden=0.0,
        part=2 * norm + residuals,  # two norms, two residuals
        ffn=5 * size,  # silu, and the product with up
        queries=10 * size + own,  # rotary embedding
        keys=10 * size + own,
        **routed,
    )


def kernels(model: Architecture, software: Software) -> int:
    """Return the number of kernels that a forward pass of a layer starts."""
    if software.layers == "Megatron":
        return FUSED_KERNELS
    norms, routing = 4 if model.norms_heads else 2, ROUTING_KERNELS * (model.experts > 1)
    if software.layers == "Fused":
        return routing + norms + 7 + 1 + 1 + 2 + 1
    of_a_norm = 8 if software.compute_bytes == HALF else 6
    # Matrix products, rotary embedding, MLP, residuals, attention.
    return routing + of_a_norm * norms + 7 + 10 + 2 + 2 + 1


def forward_peak(model: Architecture, software: Software) -> Widths:
    """Return the peak bytes of a token in a layer's forward pass without gradients, by width.

    The peak is in the MLP. It holds the residual and the MLP's input, both of hidden size, and silu(gate), up and their
    product. In a mixture it is in the experts; the factors are read off counted peaks.
    """
    size = software.compute_bytes
    if model.experts > 1:
        return Widths(hidden=size, part=size, ffn=size, queries=0.0, keys=0.0, routed=4 * size, exchanged=size)
    return Widths(hidden=size, part=size, ffn=3 * size, queries=0.0, keys=0.0)


def backward_peak(model: Architecture, software: Software) -> Widths:
    """Return the peak bytes of a token in a layer's backward pass, by width; kept activations (`kept`) do not count.

    These bytes are gradients in the MLP, and gradients of norms in float32; DeepSeek-V3 (alone with latent attention)
    weighs the outputs of experts in float32. The factors are read off counted peaks (docs/performance.md), against
    which tests check them.
    """
    size = software.compute_bytes
    weighed = FLOAT * (model.attention > 0)
    return Widths(hidden=3 * size, part=5 * size, ffn=3 * size, queries=0.0, keys=0.0, routed=weighed)
