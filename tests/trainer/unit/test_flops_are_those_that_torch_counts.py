"""What MFU is made of: the FLOPs of a forward pass, against torch's own count of the same model."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, MixtralConfig

from rlhf_trainer.training.batching import RowCosts
from tests.trainer.tiny import tiny_config

HEADS_BY_WIDTH = 64
"""Heads times the width of each, of the tiny model."""


@pytest.mark.parametrize("length", [16, 200])
def test_a_forward_pass_has_the_flops_that_torch_counts(length: int) -> None:
    config = tiny_config()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(1, length, dtype=torch.int64))
    above_diagonal = (
        2 * HEADS_BY_WIDTH * length**2 * config.num_hidden_layers
    )  # half of both products, causal ones skip
    costs = RowCosts(model)
    flops = costs.flops(float(costs.of(torch.tensor([length])).sum()), read=length)
    assert flops == pytest.approx(counter.get_total_flops() - above_diagonal, rel=0.01)


def test_a_token_meets_few_experts_of_a_mixture() -> None:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 64}
    config = MixtralConfig(hidden_size=32, intermediate_size=64, num_local_experts=8, num_experts_per_tok=2, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    attention, router, norms, expert = 2 * 32 * 32 + 2 * 32 * 16, 8 * 32, 2 * 32, 3 * 32 * 64
    of_a_token = attention + router + norms + 2 * expert
    assert RowCosts(model).of(torch.tensor([1])).tolist() == [of_a_token + 32]
