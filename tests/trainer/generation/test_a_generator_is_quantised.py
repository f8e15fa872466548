"""Engines with weights of 8 bits: what a layer holds after an exchange, its bytes, and how near its responses are.

Layers are compared with products of integers that are rounded here, by hand. Kernels for GPUs were not run: their live
tensors are stood in for.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig

from rlhf_api.spec.rollout import Rollout
from rlhf_mapper.architecture import architecture_of
from rlhf_mapper.coefficients import software_for
from rlhf_mapper.simulate.generation import cached_bytes, weights_of_gpu
from rlhf_mapper.simulate.layouts import Layouts
from rlhf_mapper.simulate.passes import Passes
from rlhf_trainer.errors import ConfigError, EnvironmentProblem
from rlhf_trainer.generation.checksum import bit_sum
from rlhf_trainer.generation.families import must_quantize
from rlhf_trainer.tensor_slice import TensorSlice
from tests.mapper.oracles.testbed import machines
from tests.trainer.generation.conftest import RunRanks
from tests.trainer.generation.engines import build, cut
from tests.trainer.generation.models import model_of, save_config, weights_of

PROMPTS = [[5 + start, 5 + start + step] for start in range(0, 64, 4) for step in (1, 2, 3)]
INT8 = Rollout(quantization="Int8")
BOTH, CACHE = Rollout(quantization="Int8", kv_cache="FP8"), Rollout(kv_cache="FP8")


def refused() -> str:
    """Why this CPU computes no 8 bits."""
    try:
        for rollout in (BOTH, CACHE):
            must_quantize(rollout, LlamaConfig(), on_cpu=True)
    except ConfigError as error:
        return str(error)
    return ""


NEEDS_VNNI = pytest.mark.skipif(bool(refused()), reason=refused())
SCALES = 2 * 4
"""Bytes of a row's scale and of its zero point's correction, which oneDNN keeps though it is not read."""


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round(), scale


def products_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product of rounded activations and rounded weights; activations have a scale a token."""
    (tokens, of_tokens), (rows, of_rows) = rounded(x), rounded(weight)
    return tokens @ rows.T * of_tokens * of_rows.T


def layers_of(folder: str, groups: list[list[int]], stages: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return the outputs of each layer of a rounded engine, those that are expected, and the engine's checksums."""
    engine = build(folder, groups, stages, rollout=INT8)
    weights, holds = weights_of(folder, 1), engine.held_shards()
    shards = {name: weights[name][part.within(whole(weights[name]))] for name, part in holds.items()}
    for _ in range(2):
        sums = engine.load_weights(cut(weights, holds), holds)
        engine.sleep()
    engine.load_weights(cut(weights, holds), holds)
    model = engine._call("get_model")
    found = {}
    first = next((int(name.split(".")[2]) for name in holds if ".layers." in name), 0)
    for number, layer in enumerate(model.model.layers[first : first + (stages or (3,))[0 if first == 0 else 1]], first):
        for path, names in {
            "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "self_attn.o_proj": ("o_proj",),
            "mlp.gate_up_proj": ("gate_proj", "up_proj"),
            "mlp.down_proj": ("down_proj",),
        }.items():
            module, block = layer.get_submodule(path), path.partition(".")[0]
            expected = torch.cat([shards[f"model.layers.{number}.{block}.{name}.weight"] for name in names])
            x = torch.randn(3, expected.shape[1], generator=torch.Generator().manual_seed(number))
            found[f"{number}.{path}"] = module.quant_method.apply(module, x), products_by_hand(x, expected)
    wrong = [name for name, shard in shards.items() if not torch.equal(sums[name], bit_sum(shard.contiguous()))]
    engine.wake_cache()
    written = engine.generate(PROMPTS, list(range(len(PROMPTS))), max_tokens=8, greedy=True)
    return {"layers": found, "wrong sums": wrong, "written": [list(each.tokens) for each in written]}


def whole(weight: Tensor) -> TensorSlice:
    return TensorSlice.whole(tuple(weight.shape))


@NEEDS_VNNI
def test_live_layers_are_the_rounded_shards(tmp_path: Path, vllm_ranks: RunRanks) -> None:
    folder = save_config(tmp_path, "llama")
    for rank in vllm_ranks(2, layers_of, folder, [[0, 1]]):
        assert len(rank["layers"]) == 12
        for name, (computed, expected) in rank["layers"].items():
            torch.testing.assert_close(computed, expected, atol=1e-5, rtol=1e-5, msg=name)
        assert rank["wrong sums"] == [], "sums are those of the weights that came"


@NEEDS_VNNI
@pytest.mark.slow
def test_stages_round_their_layers_as_one_rank_does(tmp_path: Path, vllm_ranks: RunRanks) -> None:
    folder = save_config(tmp_path, "llama")
    (one,), stages = vllm_ranks(1, layers_of, folder, [[0]]), vllm_ranks(2, layers_of, folder, [[0], [1]], (2, 1))
    assert [len(rank["layers"]) for rank in stages] == [8, 4]
    for rank in stages:
        for name, (computed, _) in rank["layers"].items():
            torch.testing.assert_close(computed, one["layers"][name][0], rtol=0, atol=0, msg=name)
        assert rank["wrong sums"] == []
        assert rank["written"] == one["written"]


def trained(folder: str) -> nn.Module:
    """A model that has learned to count in steps of 1 to 3."""
    model = model_of(folder, 1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        first, step = torch.randint(64, (32, 1), generator=generator), torch.randint(1, 4, (32, 1), generator=generator)
        rows = 5 + first + step * torch.arange(20)
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    learnt: nn.Module = model.eval()
    return learnt


def answers(folder: str, rollout: Rollout, state: dict[str, Tensor]) -> dict[str, Any]:
    engine = build(folder, [[0]], rollout=rollout)
    holds = engine.held_shards()
    engine.load_weights(cut(state, holds), holds)
    found: dict[str, Any] = {"weights": engine.bytes_held()}
    engine.wake_cache()
    found["cache"] = engine.bytes_held() - found["weights"]
    for name, greedy in (("greedy", True), ("sampled", False)):
        seeds = list(range(len(PROMPTS)))
        responses = engine.generate(PROMPTS, seeds, max_tokens=16, greedy=greedy)
        found[name] = [(list(each.tokens), list(each.log_probs)) for each in responses]
    engine.sleep()
    found["asleep"] = engine.bytes_held()
    return found


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, vllm_ranks: RunRanks) -> Any:
    """(folder, trained model, answers of engines: float32, rounded weights, these with a rounded cache, that alone)."""
    folder = save_config(tmp_path_factory.mktemp("model"), "llama")
    model = trained(folder)
    state = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return folder, model, *(vllm_ranks(1, answers, folder, each, state)[0] for each in (Rollout(), INT8, BOTH, CACHE))


@NEEDS_VNNI
def test_rounded_weights_write_nearly_what_exact_ones_do(case: Any) -> None:
    _, model, exact, *others = case
    for other in others:
        pairs = zip(exact["greedy"], other["greedy"], strict=True)
        equal = [one == two for (mine, _), (its, _) in pairs for one, two in zip(mine, its, strict=True)]
        assert np.mean(equal) > 0.95
        assert not np.allclose(other["greedy"][0][1], exact["greedy"][0][1], atol=1e-6), "something was rounded"
        assert kl(model, other["sampled"]) < 0.01
        assert kl(model, exact["sampled"]) < 1e-6


@torch.no_grad()
def kl(model: Any, sampled: list[tuple[list[int], list[float]]]) -> float:
    """KL divergence of the generator from the model a token, by K3."""
    found = []
    for prompt, (tokens, log_probs) in zip(PROMPTS, sampled, strict=True):
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        ratio = logits[range(len(tokens)), tokens] - torch.tensor(log_probs)
        found.append(ratio.exp() - 1 - ratio)
    return float(torch.cat(found).mean())


@NEEDS_VNNI
def test_bytes_fall_as_the_mapper_says(case: Any) -> None:
    folder, _, exact, rounded_weights, rounded_cache, only_cache = case
    model, one = architecture_of(AutoConfig.from_pretrained(folder).to_dict()), Layouts(*(np.array(1.0) for _ in "ptd"))
    of_rollout = [
        Passes(model, machines(8), software_for("CPU", "FP32", rollout=each)) for each in (Rollout(), INT8, BOTH)
    ]
    weights = [float(weights_of_gpu(each, one)) for each in of_rollout]
    rows = model.layers * ((model.heads + 2 * model.kv_heads) * model.head_size + 2 * model.hidden + 2 * model.ffn)
    assert rounded_weights["weights"] - exact["weights"] == weights[1] - weights[0] + SCALES * rows
    cache = [float(cached_bytes(each, one, 1.0)) for each in of_rollout]
    assert rounded_weights["cache"] == exact["cache"]
    assert rounded_weights["asleep"] == rounded_cache["asleep"] == 0
    assert rounded_cache["cache"] / exact["cache"] == cache[2] / cache[0] == 1 / 4
    assert (only_cache["cache"], only_cache["weights"]) == (rounded_cache["cache"], exact["weights"])


def refusal_of_a_layer(folder: str) -> str:
    from rlhf_trainer.generation.vllm_arguments import SETTINGS

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SETTINGS["quantization"]["Int8"], "ignore", ["lm_head", "re:.*mlp.*"])
        with pytest.raises(EnvironmentProblem) as refused:
            build(folder, [[0]], rollout=INT8)
    return str(refused.value)


@NEEDS_VNNI
def test_a_layer_that_stays_as_it_was_is_refused(tmp_path: Path, vllm_ranks: RunRanks) -> None:
    (said,) = vllm_ranks(1, refusal_of_a_layer, save_config(tmp_path, "llama"))
    assert said.startswith("spec.rollout.quantization: is Int8, but vLLM ")
    assert "computes model.layers.0.mlp.gate_up_proj by its UnquantizedLinearMethod" in said


def live_tensors_of_gpus() -> dict[str, tuple[bool, Tensor, Tensor]]:
    """(whether the addresses are as before, weights, scales) of layers of kernels for GPUs."""
    from vllm.model_executor.kernels.linear.scaled_mm import cutlass
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes

    from rlhf_trainer.generation import quantized_layers as layers

    found = {}
    kind: Any
    for kernel, scheme, kind in (
        (cutlass.CutlassInt8ScaledMMLinearKernel, schemes.CompressedTensorsW8A8Int8, "Int8"),
        (cutlass.CutlassFP8ScaledMMLinearKernel, schemes.CompressedTensorsW8A8Fp8, "FP8"),
    ):
        layer: Any = nn.Module.__new__(LinearBase)
        nn.Module.__init__(layer)
        layer.output_size, layer.input_size, layer.params_dtype = 4, 6, torch.bfloat16
        live = torch.zeros(4, 6, dtype=layers.TYPES[kind])
        layer.weight = nn.Parameter(live.T, requires_grad=False)
        layer.weight_scale = nn.Parameter(torch.zeros(4, 1), requires_grad=False)
        layer.scheme = object.__new__(scheme)
        layer.scheme.kernel = layer.scheme.fp8_linear = object.__new__(kernel)
        layer.scheme.__dict__.pop("fp8_linear" if kind == "Int8" else "kernel")
        layers.require_quantized(nn.ModuleList([layer]), kind)
        weight = layers.empty_weight(layer).copy_(torch.arange(24.0).view(4, 6) - 12)
        layers.write_quantized(layer, weight)
        found[kind] = layer.weight.data_ptr() == live.data_ptr(), live.float(), layer.weight_scale.data
    return found


def test_kernels_of_gpus_find_weights_at_their_place(vllm_ranks: RunRanks) -> None:
    (found,) = vllm_ranks(1, live_tensors_of_gpus)
    exact = torch.arange(24.0).view(4, 6) - 12
    for name, most in {"Int8": 127, "FP8": 448}.items():
        is_in_place, values, scales = found[name]
        assert is_in_place
        torch.testing.assert_close(scales, exact.abs().amax(1, keepdim=True) / most)
        torch.testing.assert_close(values * scales, exact, rtol=2**-4, atol=0.06)
    assert torch.equal(found["Int8"][1], rounded(exact)[0])
