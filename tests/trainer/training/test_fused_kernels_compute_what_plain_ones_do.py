"""Fused layers and head beside plain ones, by Triton's interpreter: values and gradients, in float32.

Texts are packed in one row, and heads are tied or cut over the vocabulary. The head's kernels are compiled for Hopper.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.training import head, kernels
from rlhf_trainer.training.attention import use_attention
from rlhf_trainer.training.head import HeadOptions, Likelihood, VocabularyPart, likelihood
from rlhf_trainer.training.model_input import ModelInput, TokenBatch
from rlhf_trainer.training.models import LanguageModel
from rlhf_trainer.training.sharding import shard
from tests.trainer.ranks import RankServer, import_trainer

VOCABULARY, ROWS = 101, 7
"""A vocabulary that two ranks cannot share evenly; rows of a chunk, which tokens do not fill evenly."""
LENGTHS = (9, 5, 7)
CPU = torch.device("cpu")


class Passed(NamedTuple):
    """Results of a forward and a backward pass."""

    log_probs: Tensor
    entropy: Tensor
    gradients: dict[str, Tensor]
    functions: Counter[str]
    """Names of liger-kernel's functions in the graph."""


Passes = dict[tuple[str, bool], list[Passed]]
"""(model type, whether the head is tied) -> results with plain and with fused kernels."""


@cache
def interpreting() -> RankServer:
    """Server of ranks that has the variable in its environment before anything imports Triton."""
    with patch.dict(os.environ, TRITON_INTERPRET="1"):
        return RankServer(import_trainer)


def run_interpreted(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a function as `run_ranks` does, with kernels that Triton's interpreter computes."""
    with patch.dict(os.environ, TRITON_INTERPRET="1"):
        return interpreting().run(ranks, function, *arguments)


def complete_interpreter() -> None:
    """Teach Triton's interpreter numbers of Python as arguments, and two functions of CUDA's library."""
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def converted(given: Any) -> Any:
        if not isinstance(given, float):
            return convert(given)
        return tl.tensor(interpreter.TensorHandle(np.array([given], dtype=np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = converted
    rms_norm.rsqrt = lambda x: 1.0 / tl.sqrt(x)
    geglu.tanh = lambda x: 2.0 * tl.sigmoid(2.0 * x) - 1.0


def passes(tensor: int, families: Sequence[str]) -> Passes:
    complete_interpreter()
    cases = [(family, tied) for family in families for tied in (True, False)]
    return {(family, tied): passes_of(family, tensor, tied=tied) for family, tied in cases}


def passes_of(family: str, tensor: int, *, tied: bool) -> list[Passed]:
    """What a small model computes with plain kernels, and with fused ones."""
    from rlhf_trainer.training import head_kernels

    head.CPU_CHUNK_LOGITS = VOCABULARY * ROWS
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        sliding_window=4,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    tokens = torch.randint(1, VOCABULARY, (3, max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor(LENGTHS)
    read = (torch.arange(max(LENGTHS)) < lengths[:, None]).float()
    batch = TokenBatch(tokens=tokens, lengths=lengths, read=read, temperature=0.7, entropy=True)
    given = ModelInput.of([batch], multiple=tensor)
    found = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        model = LanguageModel(AutoModelForCausalLM.from_config(config))
        for parameter in model.parameters():  # norms and biases begin with ones and zeros
            parameter.data += 0.1 * torch.randn_like(parameter)
        use_attention(model.causal_lm, "SDPA", device=CPU, dtype=torch.float32)
        layout = ParallelSizes(data=1, tensor=tensor)
        module = shard(model, layout, compute_dtype=torch.float32, recompute_activations=True).module
        if is_fused:
            kernels.fuse_layers(model.causal_lm)
            model.kernels = head_kernels
        output = module(given.tokens, given)
        loss = (output.log_probs * torch.linspace(-1.0, 1.0, max(LENGTHS))).sum() + 0.3 * output.entropy.sum()
        functions = Counter(functions_of(loss))
        loss.backward()
        gradients = {
            name: each.grad.full_tensor() for name, each in module.named_parameters() if isinstance(each.grad, DTensor)
        }
        found.append(Passed(output.log_probs.detach(), output.entropy.detach(), gradients, functions))
    return found


def functions_of(tensor: Tensor) -> Iterator[str]:
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
            if node.name().startswith("Liger"):
                yield node.name().removesuffix("FunctionBackward")


def assert_same(plain: Passed, fused: Passed) -> None:
    assert not plain.functions
    assert_close(plain[:3], fused[:3], atol=2e-5, rtol=1e-4)


SHARED = ("llama", "qwen3")
"""Families that two ranks compute together."""


@cache
def alone(family: str) -> Passes:
    """What one rank computes."""
    found: Passes
    [found] = run_interpreted(1, passes, 1, (family,))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", kernels.FAMILIES)
def test_fused_layers_and_head_compute_the_same(family: str, tied: bool) -> None:
    plain, fused = alone(family)[family, tied]
    assert_same(plain, fused)
    product = "LigerGELUMul" if family.startswith("gemma") else "LigerSiLUMul"
    norms = {"qwen3": 9, "gemma2": 9, "gemma3_text": 13}.get(family, 5)
    assert fused.functions == {"LigerRMSNorm": norms, "LigerRope": 2, product: 2}


@pytest.mark.slow
@pytest.mark.parametrize("family", SHARED)
def test_ranks_that_share_a_fused_model_compute_the_same(family: str) -> None:
    for shared in run_interpreted(2, passes, 2, (family,)):
        for case, (plain, fused) in shared.items():
            assert_same(plain, fused)
            assert_same(alone(family)[case][0], fused)


def head_alone(softcap: float | None, entropy: float) -> list[tuple[Likelihood, tuple[Tensor, ...]]]:
    from rlhf_trainer.training import head_kernels

    head.CPU_CHUNK_LOGITS = ROWS * 5003
    seeded = torch.Generator().manual_seed(0)
    hidden, weight = (3.0 * torch.randn(size, 8, generator=seeded).requires_grad_() for size in (15, 5003))
    tokens = torch.randint(5003, (15,), generator=seeded)
    temperature, upstream = torch.linspace(0.5, 2.0, 15), torch.linspace(-1.0, 2.0, 15)
    found = []
    for module in (None, head_kernels):
        options: Any = {"softcap": softcap, "entropy": entropy > 0, "kernels": module}
        output = likelihood(hidden, weight, tokens, temperature, **options)
        loss = (upstream * (output.log_probs + entropy * output.entropy)).sum()
        gradients = torch.autograd.grad(loss, [hidden, weight])
        found.append((Likelihood(output.log_probs.detach(), output.entropy.detach()), gradients))
    return found


@pytest.mark.parametrize(
    ("softcap", "entropy"),
    [(30.0, 0.3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((None, 0.0), (None, 0.3), (30.0, 0.0)))],
)
def test_the_fused_head_takes_each_tokens_temperature(softcap: float | None, entropy: float) -> None:
    # rows of more than one block of logits, the last one not full
    [(plain, fused)] = run_interpreted(1, head_alone, softcap, entropy)
    assert_close(plain, fused, atol=2e-5, rtol=1e-4)


def sums_of_a_part() -> list[Tensor]:
    """Sums of logits whose tokens are in parts of other ranks, before and after this one, but for the last."""
    from rlhf_trainer.training import head_kernels

    tokens, temperature = torch.tensor([0, 99, 100 + VOCABULARY, 127 + VOCABULARY, 100]), torch.full((5,), 0.7)
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(0))
    options = HeadOptions(VocabularyPart(first=100), entropy=True, softcap=None, kernels=None)
    found = [torch.empty(4, 5) for _ in range(2)]
    for module, each in zip((head, head_kernels), found, strict=True):
        module.sum_logits(logits.clone(), tokens, temperature, options, each)
    return found


def test_a_token_of_another_rank_counts_for_nothing() -> None:
    [(plain, fused)] = run_interpreted(1, sums_of_a_part)
    assert_close(plain, fused)
    assert fused[3].count_nonzero() == 1


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
def test_the_heads_kernels_compile_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, dtype: str) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rlhf_trainer.training import head_kernels

    scalars = dict.fromkeys(("stride", "width", "first"), "i32") | {"softcap": "fp32"}
    constants = {"entropy": True, "is_capped": True, "block": head_kernels.BLOCK}
    pointers = {"logits": dtype, "tokens": "*i64", "temperature": "*fp32"}
    for kernel, last in ((head_kernels._sum_rows, "found"), (head_kernels._differentiate_rows, "given")):
        signature = {**pointers, last: "*fp32", **scalars, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(kernel, signature=signature, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": head_kernels.WARPS})
        assert made.asm["cubin"]


def test_fused_kernels_are_refused_without_a_gpu() -> None:
    model = LanguageModel(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_hidden_layers=0)))
    with pytest.raises(ConfigError, match=r"spec\.training\.kernels: Fused needs a GPU; Auto takes what runs"):
        kernels.use_kernels(model, "Fused", device=CPU)
    kernels.use_kernels(model, "Auto", device=CPU)
    assert model.kernels is None


def test_a_family_that_is_not_known_is_named() -> None:
    config = AutoConfig.for_model("olmo2")
    assert kernels.why_plain(config, is_elsewhere=True).endswith("gemma2 or gemma3_text, not olmo2")
    assert not kernels.why_plain(AutoConfig.for_model("qwen2"), is_elsewhere=True)
