"""Log-probabilities, entropies and values of tokens: by hand, against torch's own, and their alignment."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from rlhf_trainer.ops.log_probs import shift_values, token_entropy, token_log_probs

B, T, V = 3, 5, 7


@pytest.fixture
def logits() -> Tensor:
    return 3.0 * torch.randn(B, T, V, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


def test_values_by_hand() -> None:
    logits = torch.tensor([[[0.0, math.log(3.0)], [math.log(9.0), 0.0], [50.0, -50.0]]])
    # after token 0 the odds are 1:3, after token 1 they are 9:1; the last logits predict nothing in the row
    tokens = torch.tensor([[0, 1, 0]])
    assert_close(token_log_probs(logits, tokens), torch.tensor([[0.0, math.log(0.75), math.log(0.9)]]))
    # temperature 2 takes the square root of the odds: 1:sqrt(3), 3:1
    expected = [0.0, math.log(math.sqrt(3.0) / (1.0 + math.sqrt(3.0))), math.log(0.75)]
    assert_close(token_log_probs(logits, tokens, temperature=2.0), torch.tensor([expected]))


def test_entropy_by_hand() -> None:
    logits = torch.tensor([[[0.0, 0.0], [0.0, math.log(3.0)], [1.0, 2.0]]])
    expected = [0.0, math.log(2.0), -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))]
    assert_close(token_entropy(logits, temperature=1.0), torch.tensor([expected]))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_their_gradient_are_those_of_cross_entropy(
    logits: Tensor, tokens: Tensor, temperature: float
) -> None:
    logits.requires_grad_()
    weight = torch.linspace(-1.0, 2.0, B * T).view(B, T)
    found = token_log_probs(logits, tokens, temperature=temperature)
    by_torch = -cross_entropy((logits[:, :-1] / temperature).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    expected = by_torch.view(B, T - 1)
    assert_close(found[:, 1:], expected)
    assert_close(
        torch.autograd.grad((found * weight).sum(), logits),
        torch.autograd.grad((expected * weight[:, 1:]).sum(), logits),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_is_that_of_the_categorical_distribution(logits: Tensor, temperature: float) -> None:
    expected = Categorical(logits=logits[:, :-1] / temperature).entropy()  # type: ignore[no-untyped-call]
    assert_close(token_entropy(logits, temperature=temperature)[:, 1:], expected)


def test_position_0_is_zero_and_a_token_does_not_see_itself_or_later_ones(logits: Tensor, tokens: Tensor) -> None:
    log_probs, entropy = token_log_probs(logits, tokens), token_entropy(logits, temperature=1.0)
    assert log_probs[:, 0].tolist() == entropy[:, 0].tolist() == [0.0] * B
    changed = logits.clone()
    changed[:, 2] += torch.arange(V)  # these logits predict token 3
    for before, after in [
        (log_probs, token_log_probs(changed, tokens)),
        (entropy, token_entropy(changed, temperature=1.0)),
    ]:
        assert (before != after).any(dim=0).tolist() == [False, False, False, True, False]


def test_probabilities_of_all_tokens_add_up_to_one(logits: Tensor) -> None:
    each = [token_log_probs(logits, torch.full((B, T), v), temperature=0.5).exp() for v in range(V)]
    assert_close(torch.stack(each).sum(dim=0)[:, 1:], torch.ones(B, T - 1))


def test_half_precision_logits_are_computed_in_float32(tokens: Tensor) -> None:
    logits = (20.0 * torch.randn(B, T, V, generator=torch.Generator().manual_seed(2))).bfloat16()
    found = token_log_probs(logits, tokens)
    assert found.dtype == token_entropy(logits, temperature=1.0).dtype == torch.float32
    exact = logits.double().log_softmax(dim=2)[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)
    assert_close(found[:, 1:].double(), exact, atol=1e-5, rtol=1e-6)


def test_a_large_common_offset_changes_nothing(logits: Tensor, tokens: Tensor) -> None:
    assert_close(token_log_probs(logits + 1000.0, tokens), token_log_probs(logits, tokens), atol=1e-3, rtol=0)


def test_tokens_that_cannot_be_drawn_leave_entropy_log_probs_and_gradients_finite() -> None:
    # a padded vocabulary: two real tokens with odds 1:3 and one of probability 0
    logits = torch.tensor([[[0.0, math.log(3.0), -torch.inf]] * 2], requires_grad=True)
    entropy = token_entropy(logits, temperature=1.0)
    log_probs = token_log_probs(logits, torch.tensor([[0, 1]]))
    assert_close(entropy[0, 1].item(), -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))
    assert_close(log_probs[0, 1].item(), math.log(0.75))
    (gradient,) = torch.autograd.grad(entropy.sum() + log_probs.sum(), logits)
    # d entropy / d x_i = -p_i (log p_i + H);  d log p_1 / d x_i = [i = 1] - p_i
    entropy_of = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    expected = [-p * (math.log(p) + entropy_of) - p for p in (0.25, 0.75)]
    assert_close(gradient[0, 0], torch.tensor([expected[0], expected[1] + 1.0, 0.0]))


def test_rows_padding_and_micro_batches_do_not_touch_each_other(logits: Tensor, tokens: Tensor) -> None:
    whole, entropy = token_log_probs(logits, tokens), token_entropy(logits, temperature=1.0)
    order = torch.tensor([2, 0, 1])
    assert_close(token_log_probs(logits[order], tokens[order]), whole[order])
    assert_close(torch.cat([token_log_probs(logits[r : r + 1], tokens[r : r + 1]) for r in range(B)]), whole)
    padded_logits = torch.cat([logits, torch.full((B, 4, V), torch.nan)], dim=1)
    padded_tokens = torch.cat([tokens, torch.zeros(B, 4, dtype=torch.int64)], dim=1)
    # the last real logits predict the first padding token, hence T columns and no more
    assert_close(token_log_probs(padded_logits, padded_tokens)[:, :T], whole)
    assert_close(token_entropy(padded_logits, temperature=1.0)[:, :T], entropy)


def test_a_row_of_one_token_stays_in_the_graph_with_gradient_zero() -> None:
    # a rank that only keeps step with the others must still run its backward pass
    logits = torch.randn(1, 1, V, requires_grad=True)
    total = token_log_probs(logits, torch.zeros(1, 1, dtype=torch.int64)).sum()
    (gradient,) = torch.autograd.grad(total, logits)
    assert_close(gradient, torch.zeros(1, 1, V))


def test_the_value_of_the_state_before_token_t_comes_from_position_t_minus_1() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert shift_values(x).tolist() == [[0.0, 1.0, 2.0], [0.0, 4.0, 5.0]]


def test_the_backward_pass_of_float32_logits_keeps_no_second_copy_of_them() -> None:
    logits = torch.randn(2, 64, 100, requires_grad=True)
    kept: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        token_log_probs(logits, torch.zeros(2, 64, dtype=torch.int64))
    kept.pop(logits.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) < logits.nbytes / 10
