"""Triton kernels of the output head: they read the logits of a chunk once for its sums, and once for its gradient.

liger-kernel's head does not fit here: it takes one temperature for all tokens, waits for the device, adds up the
weight's gradient in bfloat16, and except on Hopper GPUs with CUTLASS it runs torch's operations.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_trainer.training.head import HeadOptions

LOWEST: tl.constexpr = tl.constexpr(-1e30)
"""Substitute for minus infinity, as -inf * 0 is NaN."""
BLOCK, WARPS = 4096, 8
"""Logits that a Triton program holds at a time, and its number of warps."""


def sum_logits(logits: Tensor, tokens: Tensor, temperature: Tensor, options: HeadOptions, found: Tensor) -> None:
    """Do what `head.sum_logits` does, in one kernel."""
    rows, width = logits.shape
    with _on(logits):
        _sum_rows[(rows,)](logits, tokens, temperature, found, found.stride(0), width, **_constants(width, options))


def differentiate(logits: Tensor, tokens: Tensor, temperature: Tensor, options: HeadOptions, given: Tensor) -> Tensor:
    """Do what `head.differentiate` does, in one kernel and in the memory of the logits."""
    rows, width = logits.shape
    constants = _constants(width, options) | {"entropy": len(given) > 2}
    with _on(logits):
        grid = (rows, triton.cdiv(width, constants["block"]))
        _differentiate_rows[grid](logits, tokens, temperature, given, given.stride(0), width, **constants)
    return logits


def _on(tensor: Tensor) -> torch.cuda.device:
    """Return the context in which Triton starts kernels on a tensor's device; on CPU (Triton's interpreter) a no-op."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)


def _constants(width: int, options: HeadOptions) -> dict[str, Any]:
    return {
        "first": options.part.first,
        "softcap": options.softcap or 0.0,
        "entropy": options.entropy,
        "is_capped": bool(options.softcap),
        "block": min(BLOCK, triton.next_power_of_2(width)),
        "num_warps": WARPS,
    }


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _sum_rows(
    logits,
    tokens,
    temperature,
    found,
    stride,
    width,
    first,
    softcap,
    entropy: tl.constexpr,
    is_capped: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    divisor = tl.load(temperature + row)
    own = tl.load(tokens + row) - first
    largest = LOWEST
    total = 0.0
    weighted = 0.0
    of_own = 0.0
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        x = tl.load(logits + columns, mask=columns < width, other=0.0).to(tl.float32)
        if is_capped:
            x = softcap * _tanh(x / softcap)
        of_own += tl.sum(tl.where((columns == own) & (columns < width), x / divisor, 0.0))  # 0: another rank has it
        x = tl.where(columns < width, x / divisor, LOWEST)
        before = largest
        largest = tl.maximum(before, tl.max(x))
        exponentials = tl.exp(x - largest)
        shift = before - largest
        if entropy:
            weighted = tl.exp(shift) * (weighted + shift * total) + tl.sum(exponentials * (x - largest))
        total = tl.exp(shift) * total + tl.sum(exponentials)
    tl.store(found + row, largest)
    tl.store(found + stride + row, total)
    tl.store(found + 2 * stride + row, weighted)
    tl.store(found + 3 * stride + row, of_own)


@triton.jit
def _differentiate_rows(
    logits,
    tokens,
    temperature,
    given,
    stride,
    width,
    first,
    softcap,
    entropy: tl.constexpr,
    is_capped: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    places = logits + row * width + columns
    divisor = tl.load(temperature + row)
    own = tl.load(tokens + row) - first
    of_log_prob = tl.load(given + stride + row)
    x = tl.load(places, mask=columns < width, other=0.0).to(tl.float32)
    slope = 1.0 / divisor
    if is_capped:
        bounded = _tanh(x / softcap)
        slope = (1.0 - bounded * bounded) / divisor
        x = softcap * bounded
    log_p = x / divisor - tl.load(given + row)
    of_x = -of_log_prob
    if entropy:
        of_x -= tl.load(given + 3 * stride + row) * (log_p + tl.load(given + 2 * stride + row))
    of_x = tl.exp(log_p) * of_x + tl.where(columns == own, of_log_prob, 0.0)
    tl.store(places, of_x * slope, mask=columns < width)
