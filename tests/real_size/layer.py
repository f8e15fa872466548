"""`python -m tests.real_size.layer`: what one decoder layer keeps and moves, counted on the meta device, as a table.

Bytes of a token, beside what the mapper says (`rlhf_mapper.simulate.layer`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from rlhf_api.spec.job_spec import Attention
from rlhf_mapper.architecture import Architecture, architecture_of
from rlhf_mapper.coefficients import software_for
from rlhf_mapper.simulate import layer
from rlhf_mapper.simulate.layouts import Layouts
from rlhf_trainer.training.attention import NAMES
from rlhf_trainer.training.model_input import Documents

FAMILIES: Mapping[str, tuple[type[PreTrainedConfig], type[nn.Module]]] = {
    "llama": (LlamaConfig, LlamaDecoderLayer),
    "qwen2": (Qwen2Config, Qwen2DecoderLayer),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeDecoderLayer),
}
Precision = Literal["BF16", "FP32"]
TYPES: Mapping[Precision, torch.dtype] = {"BF16": torch.bfloat16, "FP32": torch.float32}
KINDS: tuple[tuple[Attention, Precision], ...] = (("Flash", "BF16"), ("SDPA", "BF16"), ("SDPA", "FP32"))
COUNTED = [(name, *kind) for name in FAMILIES for kind in KINDS if (name, kind[1]) != ("qwen3_moe", "FP32")]
"""Torch knows grouped products of bfloat16 only."""
ROWS, TOKENS = 4, 256
"""Documents of a micro-batch, and the tokens of each."""
ONE_RANK = Layouts(np.array(1.0), np.array(1.0), np.array(1.0))
WIDTHS = {"hidden": 1024, "ffn": 4096, "heads": 16, "kv_heads": 4, "head_size": 128}
MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm", "grouped_mm_fallback")
NO_KERNELS = ("empty", "detach", "_unsafe_view", "lift", "new_empty")


@dataclass
class Counted:
    """Of one forward pass of a layer, by token."""

    kept: float
    """Bytes that the backward pass reads, weights and the tables of rotary embeddings left out."""
    moved: float
    """Bytes that are read and written outside matrix products and attention."""
    kernels: int


def starts_kernel(func: Any) -> bool:
    """Whether an operation makes new memory; views and allocations are none."""
    return not func.is_view and not func._schema.name.partition("::")[2].startswith(NO_KERNELS)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that start a kernel, and the bytes of those outside matrix products and attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved, self.kernels = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        made = [each for each in (out if isinstance(out, tuple) else (out,)) if isinstance(each, Tensor)]
        if not made or not starts_kernel(func):
            return out
        self.kernels += 1
        if name not in MATRIX_PRODUCTS and "attn" not in name and "attention" not in name:
            read = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
            self.moved += sum(each.nbytes for each in (*read, *made))
        return out


def counted(config: PreTrainedConfig, attention: Attention, dtype: torch.dtype) -> Counted:
    """A forward pass of one layer as the trainer runs it: documents packed in a row, no dropout, no cache."""
    name = config.model_type
    config._attn_implementation = NAMES[attention]
    tokens = ROWS * TOKENS
    with torch.device("meta"):
        one = FAMILIES[name][1](config, 0).to(dtype).eval()
        hidden = torch.empty(1, tokens, config.hidden_size, dtype=dtype, requires_grad=True)
        size = config.head_dim
        tables = tuple(torch.empty(1, tokens, size, dtype=dtype) for _ in range(2))
    left_out = {each.untyped_storage()._cdata for each in (*one.parameters(), *tables)}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (key := tensor.untyped_storage()._cdata) not in left_out:
            kept[key] = tensor
        return tensor

    operations, documents = _Operations(), documents_of(ROWS, TOKENS)
    with flash_on_meta(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), operations:
        one(hidden, attention_mask=None, position_embeddings=tables, documents=documents)
    bytes_ = sum(each.untyped_storage().nbytes() for each in kept.values())
    return Counted(bytes_ / tokens, operations.moved / tokens, operations.kernels)


def documents_of(count: int, tokens: int) -> Documents:
    """Texts of one length, packed in a row."""
    sizes = torch.full((2, count), tokens)
    made = Documents.of(sizes, None)
    return made.to(torch.device("meta"))


@contextmanager
def flash_on_meta() -> Iterator[None]:
    """What CUDA does in scaled_dot_product_attention, also with fewer keys than queries."""

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        output = kernel(query, key, value, is_causal=options["is_causal"], scale=options["scale"])[0]
        assert isinstance(output, Tensor)
        return output

    with patch.object(torch.nn.functional, "scaled_dot_product_attention", attention):
        yield


def config_of(family: str, **changes: int) -> PreTrainedConfig:
    """A small model of a family, in which widths may be changed."""
    widths = WIDTHS | changes
    experts = {"moe_intermediate_size": widths["ffn"], "num_experts": 16, "num_experts_per_tok": 4}
    config = FAMILIES[family][0](
        **(experts if family == "qwen3_moe" else {}),
        hidden_size=widths["hidden"],
        intermediate_size=widths["ffn"],
        num_attention_heads=widths["heads"],
        num_key_value_heads=widths["kv_heads"],
        head_dim=widths["head_size"],
        num_hidden_layers=1,
        vocab_size=64,
    )
    if family == "qwen3_moe":
        config._experts_implementation = "grouped_mm"
    return config


def shape_of(config: PreTrainedConfig) -> tuple[Architecture, int]:
    """What the mapper knows of it, and the bytes of its float32 sums (rsqrt of norms), which it leaves out."""
    model = architecture_of(config.to_dict())
    return model, 4 * (2 + (model.heads + model.kv_heads) * model.norms_heads)


def main() -> None:
    """Print the table; a line a family, attention and type."""
    for family, attention, precision in COUNTED:
        config = config_of(family)
        found, software = counted(config, attention, TYPES[precision]), software_for("GPU", precision, attention)
        model, sums = shape_of(config)
        said = [float(each(model, software).on(model, ONE_RANK)) for each in (layer.kept, layer.moved)]
        print(
            f"{family} {attention} {precision}: keeps {found.kept:.0f} (mapper {said[0] + sums:.0f}), moves "
            f"{found.moved:.0f} ({said[1]:.0f}), kernels {found.kernels} ({layer.kernels(model, software)})"
        )


if __name__ == "__main__":
    main()
