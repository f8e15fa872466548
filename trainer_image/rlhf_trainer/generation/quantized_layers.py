"""Weights of vLLM's linear layers in 8 bits, rounded by output channel after each exchange of weights.

The exchange sends and checks unrounded weights; the last slice of a layer rounds the rank's shard. A scale is that of
an output channel in the shard. In a row-parallel layer each rank holds a part of a channel's inputs and multiplies its
own product by its own scale, before ranks add up. So these scales need not agree. vLLM quantises the activations of
each token while it computes. FP8 needs a GPU, and was not run.
"""

from contextlib import nullcontext
from math import prod
from typing import Any, Literal
from unittest.mock import patch

import torch
import vllm
from torch import Tensor, nn
from vllm.model_executor.kernels.linear.scaled_mm import cpu
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import (
    CutlassFP8ScaledMMLinearKernel,
    CutlassInt8ScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonInt8ScaledMMLinearKernel
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Fp8,
    CompressedTensorsW8A8Int8,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from rlhf_trainer.errors import EnvironmentProblem

TYPES = {"Int8": torch.int8, "FP8": torch.float8_e4m3fn}
TRANSPOSED = (
    CutlassInt8ScaledMMLinearKernel,
    TritonInt8ScaledMMLinearKernel,
    CutlassFP8ScaledMMLinearKernel,
    ChannelWiseTorchFP8ScaledMMLinearKernel,
)
"""vLLM's kernels for GPUs that read the transpose of a weight of [out, in], and scales of [out, 1]."""


def linear_size(module: Any) -> tuple[int, int]:
    """Return (rows, columns) of a linear layer's weight on this rank, packed or not; routers are not sharded."""
    rows = getattr(module, "output_size_per_partition", module.output_size)
    return int(rows), int(getattr(module, "input_size_per_partition", module.input_size))


def is_quantized(module: Any) -> bool:
    """Whether a module is a linear layer with weights of 8 bits."""
    return isinstance(getattr(module, "scheme", None), CompressedTensorsW8A8Int8 | CompressedTensorsW8A8Fp8)


def _kernel(module: Any) -> Any:
    return module.scheme.kernel if isinstance(module.scheme, CompressedTensorsW8A8Int8) else module.scheme.fp8_linear


def quantize(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round a weight [out, in] to `dtype`, symmetric, by row; returns (values, float32 scales [out, 1]).

    A scale is the row's largest magnitude over the type's largest number. Integers are rounded to the nearest, ties to
    even. A row of zeros has scale 1.
    """
    exact = weight.float()
    most = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    scale = exact.abs().amax(1, keepdim=True) / most
    scale = torch.where(scale > 0, scale, 1.0)
    scaled = exact / scale
    return (scaled if dtype.is_floating_point else scaled.round()).clamp(-most, most).to(dtype), scale


def empty_weight(module: Any) -> Tensor:
    """Allocate memory for the rank's unrounded shard of a quantised layer's weight [out, in]."""
    return torch.empty(linear_size(module), dtype=module.params_dtype, device=module.weight_scale.device)


def write_quantized(module: Any, weight: Tensor) -> None:
    """Round a rank's shard of a weight [out, in] into the tensors that vLLM's kernel reads."""
    values, scale = quantize(weight, TYPES["Int8" if isinstance(module.scheme, CompressedTensorsW8A8Int8) else "FP8"])
    if isinstance(_kernel(module), TRANSPOSED):  # in place, as CUDA graphs keep the addresses
        module.weight.data.T.copy_(values)
        module.weight_scale.data.copy_(scale)
        return
    module.weight = nn.Parameter(values, requires_grad=False)
    module.weight_scale = nn.Parameter(scale, requires_grad=False)
    is_float32 = module.params_dtype == torch.float32
    without_amx = patch.object(cpu, "check_cpu_sgl_kernel", lambda *_: False) if is_float32 else nullcontext()
    with without_amx, set_default_torch_dtype(module.params_dtype):  # AMX lacks float32; outputs have the default type
        module.scheme.process_weights_after_loading(module)


def require_quantized(model: nn.Module, quantization: Literal["Int8", "FP8"]) -> None:
    """Raise EnvironmentProblem unless all linear layers of a started engine hold weights of the requested type.

    The error names the first layer that vLLM did not quantise, or whose kernel has an unknown layout.
    """
    layers = {path: each for path, each in model.named_modules() if isinstance(each, LinearBase)}
    for path, layer in layers.items():
        kernel = _kernel(layer) if is_quantized(layer) else layer.quant_method
        if not is_quantized(layer) or _live_type(layer, kernel) != TYPES[quantization]:
            raise EnvironmentProblem(
                f"spec.rollout.quantization: is {quantization}, but vLLM {vllm.__version__} computes {path} by its "
                f"{type(kernel).__name__}, with weights that this trainer does not write as {quantization}"
            )


def _live_type(layer: Any, kernel: Any) -> torch.dtype | None:
    """Return the type of a layer's weights in the memory that its kernel reads; None for an unknown layout."""
    if isinstance(kernel, CPUInt8ScaledMMLinearKernel):  # oneDNN's own copy, or packed for AMX
        return torch.int8 if layer.weight is None else layer.weight.dtype
    is_known = isinstance(kernel, TRANSPOSED) and layer.weight.T.shape == linear_size(layer)
    return layer.weight.dtype if is_known else None


def packed_bytes(layer: Any) -> int:
    """Return the bytes of oneDNN's copy of a layer's weight; 0 if the weight is still a parameter, or freed."""
    return prod(linear_size(layer)) if getattr(_kernel(layer), "dnnl_handler", None) else 0


def free_packed(layer: Any) -> None:
    """Free oneDNN's copy of a layer's weight, if there is one; the next `write_quantized` makes another."""
    if packed_bytes(layer):
        _kernel(layer).dnnl_handler = None
