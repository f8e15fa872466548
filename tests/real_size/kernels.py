"""`python -m tests.real_size.kernels`: kernels of head and layer of Qwen2.5-7B for 16,384 tokens, forward and backward.

Bytes are those of all tensors that each kernel takes and makes; what a kernel of Triton changes in place counts once.
It runs on the meta device: kernels of Triton are counted where they would start.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from rlhf_trainer.training import head, kernels
from rlhf_trainer.training.attention import NAMES
from tests.real_size.layer import documents_of, flash_on_meta, starts_kernel
from tests.real_size.shapes import SHAPES

TOKENS, TEXTS = 16384, 8
CONFIG = SHAPES["Qwen2.5-7B"]
HOPPER = SimpleNamespace(multi_processor_count=132)


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts kernels and the bytes of their tensors while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.bytes_ = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if starts_kernel(func):
            self.note([*tree_leaves((args, kwargs)), *tree_leaves(out)])
        return out

    def note(self, given: list[Any]) -> None:
        """Count a kernel and the tensors among what it is given."""
        self.count += 1
        self.bytes_ += sum(each.nbytes for each in given if isinstance(each, Tensor))

    @contextmanager
    def of_triton(self) -> Iterator[None]:
        """Count Triton's kernels instead of starting them."""
        from triton.runtime.jit import JITFunction

        def run(_: Any, *args: Any, **kwargs: Any) -> None:
            self.note([*args, *kwargs.values()])

        with ExitStack() as patches:
            patches.enter_context(patch.object(JITFunction, "run", run))
            patches.enter_context(patch.object(torch.cuda, "get_device_properties", lambda _: HOPPER))
            yield


def count(build: Callable[[], Tensor]) -> tuple[Kernels, Kernels]:
    """Kernels of (the forward pass that is built, its backward pass)."""
    forward, backward = Kernels(), Kernels()
    with forward, forward.of_triton():
        output = build()
    with backward, backward.of_triton():
        output.backward(torch.empty_like(output))  # type: ignore[no-untyped-call]
    return forward, backward


def count_head(
    *, chunk_logits: int = head.MAX_CHUNK_LOGITS, module: ModuleType | None = None
) -> tuple[Kernels, Kernels]:
    """Kernels of the head; module: that with its fused kernels."""
    with torch.device("meta"):
        hidden, weight = (
            torch.empty(size, CONFIG.hidden_size, dtype=torch.bfloat16, requires_grad=True)
            for size in (TOKENS, CONFIG.vocab_size)
        )
        tokens, temperature = torch.empty(TOKENS, dtype=torch.int64), torch.empty(TOKENS)
    options: Any = {"entropy": False, "kernels": module}
    with patch.object(head, "MAX_CHUNK_LOGITS", chunk_logits):
        return count(lambda: head.likelihood(hidden, weight, tokens, temperature, **options).log_probs)


def count_layer(*, is_fused: bool) -> tuple[Kernels, Kernels]:
    """Kernels of a layer, whose forward pass is not taken again."""
    config = copy.deepcopy(CONFIG)
    config.num_hidden_layers, config._attn_implementation = 1, NAMES["Flash"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        hidden = torch.empty(1, TOKENS, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        size = config.hidden_size // config.num_attention_heads
        tables = tuple(torch.empty(1, TOKENS, size, dtype=torch.bfloat16) for _ in range(2))
    if is_fused:
        kernels.fuse_layers(model)
    given: Any = {
        "attention_mask": None,
        "position_embeddings": tables,
        "documents": documents_of(TEXTS, TOKENS // TEXTS),
    }
    with flash_on_meta():
        return count(lambda: model.model.layers[0](hidden, **given))


def rows() -> dict[str, tuple[Kernels, Kernels]]:
    """What is counted, by its name."""
    from rlhf_trainer.training import head_kernels

    return {
        "head, chunks of 2^26 logits": count_head(chunk_logits=2**26),
        "head": count_head(),
        "head, fused": count_head(module=head_kernels),
        "layer": count_layer(is_fused=False),
        "layer, fused": count_layer(is_fused=True),
    }


def main() -> None:
    """Print the table."""
    for name, (forward, backward) in rows().items():
        gigabytes = (forward.bytes_ + backward.bytes_) / 1e9
        print(f"{name:28}{forward.count:5} + {backward.count:3} kernels{gigabytes:7.1f} GB")


if __name__ == "__main__":
    main()
