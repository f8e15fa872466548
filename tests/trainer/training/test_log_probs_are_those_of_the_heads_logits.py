"""Log-probabilities and entropies from hidden states: by hand, against torch's own, in chunks of any size.

Where the head is the identity the hidden states are the logits.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_trainer.errors import DataError
from rlhf_trainer.training import head
from rlhf_trainer.training.head import Likelihood, likelihood
from rlhf_trainer.training.models import LanguageModel

N, H, V = 15, 4, 7


def of_logits(logits: Tensor, tokens: Tensor, *, temperature: float = 1.0) -> Likelihood:
    weight = torch.eye(logits.shape[1], dtype=logits.dtype)
    return likelihood(logits, weight, tokens, torch.full((len(tokens),), temperature), entropy=True)


@pytest.fixture
def hidden() -> Tensor:
    return 3.0 * torch.randn(N, H, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(V, H, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(V, (N,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[1, 4, 100], autouse=True)
def rows_of_a_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CPU_CHUNK_LOGITS", V * request.param)


def test_values_by_hand() -> None:
    logits, tokens = torch.tensor([[0.0, math.log(3.0)], [math.log(9.0), 0.0]]), torch.tensor([1, 0])
    assert_close(of_logits(logits, tokens).log_probs, torch.tensor([math.log(0.75), math.log(0.9)]))
    # temperature 2 takes the square root of the odds: 1:sqrt(3), 3:1
    expected = [math.log(math.sqrt(3.0) / (1.0 + math.sqrt(3.0))), math.log(0.75)]
    assert_close(of_logits(logits, tokens, temperature=2.0).log_probs, torch.tensor(expected))
    three_to_one, tenth = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), -(0.1 * math.log(0.1) + 0.9 * math.log(0.9))
    assert_close(of_logits(logits, tokens).entropy, torch.tensor([three_to_one, tenth]))


@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_log_probs_entropies_and_gradients_are_those_of_torch(
    hidden: Tensor, weight: Tensor, tokens: Tensor, entropy: float
) -> None:
    hidden.requires_grad_()
    weight.requires_grad_()
    temperature = torch.linspace(0.5, 2.0, N)
    upstream = torch.linspace(-1.0, 2.0, N)
    logits = hidden @ weight.T / temperature[:, None]
    expected = -cross_entropy(logits, tokens, reduction="none")
    expected_entropy = Categorical(logits=logits).entropy()  # type: ignore[no-untyped-call]
    found = likelihood(hidden, weight, tokens, temperature, entropy=entropy > 0)
    assert_close(found.log_probs, expected)
    total, expected_total = (found.log_probs * upstream).sum(), (expected * upstream).sum()
    if entropy:
        assert_close(found.entropy, expected_entropy)
        total, expected_total = total + entropy * found.entropy.sum(), expected_total + entropy * expected_entropy.sum()
    else:
        assert not found.entropy.any()
    assert_close(
        torch.autograd.grad(total, [hidden, weight]),
        torch.autograd.grad(expected_total, [hidden, weight]),
        atol=2e-6,
        rtol=1e-5,
    )


def test_probabilities_of_all_tokens_add_up_to_one(hidden: Tensor, weight: Tensor) -> None:
    temperature = torch.full((N,), 0.5)
    each = [likelihood(hidden, weight, torch.full((N,), v), temperature, entropy=False).log_probs for v in range(V)]
    assert_close(torch.stack(each).exp().sum(dim=0), torch.ones(N))


def test_half_precision_logits_are_computed_in_float32() -> None:
    logits = (20.0 * torch.randn(N, V, generator=torch.Generator().manual_seed(2))).bfloat16()
    tokens = torch.arange(N) % V
    found = of_logits(logits, tokens)
    assert found.log_probs.dtype == found.entropy.dtype == torch.float32
    exact = logits.double().log_softmax(dim=1).gather(1, tokens[:, None])[:, 0]
    assert_close(found.log_probs.double(), exact, atol=1e-5, rtol=1e-6)


def test_the_weights_gradient_is_added_up_in_float32() -> None:
    # 512 equal gradients: a sum in bfloat16 stops at 256 of them
    hidden, weight = (
        torch.ones(512, 1, dtype=torch.bfloat16),
        torch.zeros(V, 1, dtype=torch.bfloat16, requires_grad=True),
    )
    found = likelihood(hidden, weight, torch.zeros(512, dtype=torch.int64), torch.ones(512), entropy=False)
    (gradient,) = torch.autograd.grad(found.log_probs.sum(), weight)
    assert gradient.dtype == torch.bfloat16
    assert_close(gradient[0, 0].item(), 512 * (1 - 1 / V), rtol=0.01, atol=0)


def test_a_large_common_offset_changes_nothing(tokens: Tensor) -> None:
    logits = torch.randn(N, V, generator=torch.Generator().manual_seed(0))
    assert_close(of_logits(logits + 1000.0, tokens), of_logits(logits, tokens), atol=1e-3, rtol=0)


def test_where_nothing_is_read_gradients_are_zero(hidden: Tensor, weight: Tensor) -> None:
    # a rank that only keeps step with the others must still run its backward pass
    hidden, weight = hidden[:0].requires_grad_(), weight.requires_grad_()
    found = likelihood(hidden, weight, torch.zeros(0, dtype=torch.int64), torch.zeros(0), entropy=True)
    (gradient,) = torch.autograd.grad(found.log_probs.sum() + found.entropy.sum(), weight)
    assert gradient.shape == weight.shape
    assert not gradient.any()


@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_logits_that_are_bounded_have_gradients_that_are_bounded(
    hidden: Tensor, weight: Tensor, tokens: Tensor, entropy: float
) -> None:
    hidden.requires_grad_()
    weight.requires_grad_()
    temperature, upstream = torch.linspace(0.5, 2.0, N), torch.linspace(-1.0, 2.0, N)
    logits = 3.0 * torch.tanh(hidden @ weight.T / 3.0) / temperature[:, None]
    expected = -cross_entropy(logits, tokens, reduction="none")
    found = likelihood(hidden, weight, tokens, temperature, entropy=entropy > 0, softcap=3.0)
    assert_close(found.log_probs, expected)
    total, expected_total = (found.log_probs * upstream).sum(), (expected * upstream).sum()
    if entropy:
        of_all = Categorical(logits=logits).entropy()  # type: ignore[no-untyped-call]
        assert_close(found.entropy, of_all)
        total, expected_total = total + entropy * found.entropy.sum(), expected_total + entropy * of_all.sum()
    assert_close(
        torch.autograd.grad(total, [hidden, weight]),
        torch.autograd.grad(expected_total, [hidden, weight]),
    )


def test_a_head_with_a_bias_is_refused() -> None:
    config = AutoConfig.for_model(
        "phi", vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(DataError, match="the model's head has a bias, which is not supported"):
        LanguageModel(AutoModelForCausalLM.from_config(config))
