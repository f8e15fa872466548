"""Distillation's advantage and divergences (arXiv:2306.13649, section 2) by hand, and the head's against plain ones."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlhf_trainer.algorithms.distillation import Distillation
from rlhf_trainer.training import head
from rlhf_trainer.training.head import divergence_from, likeliest_tokens

N, H, V = 9, 4, 7
OPTIONS: dict[str, dict[str, Any]] = {
    "Forward": {},
    "Reverse": {},
    "JensenShannon": {},
    "JensenShannon of little teacher": {"teacherShare": 0.1},
}


def distillation(case: str, **options: Any) -> Distillation:
    named = {"name": "Distillation", "divergence": case.partition(" ")[0], **OPTIONS.get(case, {}), **options}
    return Distillation.model_validate(named, by_alias=True, by_name=False)


def plain(case: str, student: Tensor, teacher: Tensor) -> Tensor:
    """The divergence of probabilities [n, K], as the paper writes it."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return torch.sum(p * (p / q).log(), dim=1)

    if case == "Forward":
        return kl(teacher, student)
    if case == "Reverse":
        return kl(student, teacher)
    beta = float(OPTIONS[case].get("teacherShare", 0.5))
    mixture = beta * teacher + (1 - beta) * student
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def test_distillation_by_hand() -> None:
    """Two prompts with two responses each, of which this rank has the second prompt's; rewards 3 and 1."""
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    given: dict[str, Any] = {"rows": slice(2, 4), "group_size": 2}
    returns = torch.tensor([0.0, 0.0, 3.0, 1.0], dtype=torch.float64)
    teacher, old = (
        torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, 0.0]]),
        torch.tensor([[0.0, -2.0, -0.5], [0.0, -3.0, 0]]),
    )
    log_probs: dict[str, Any] = {"teacher_log_probs": teacher, "old_log_probs": old}
    sampled = distillation("Sampled", divergenceCoefficient=2.0)
    alone = sampled.advantage(torch.zeros(4, dtype=torch.float64), mask, **given, **log_probs)
    assert_close(alone * mask, torch.tensor([[0.0, 2.0, -3.0], [0.0, 0.0, 0.0]]))
    both = sampled.advantage(returns, mask, **given, **log_probs)
    of_reward = 1.0 / math.sqrt(2.0)  # GRPO's, of a standard deviation of sqrt(2)
    expected = alone + torch.tensor([[of_reward], [-of_reward]])
    assert_close(both * mask, expected * mask, rtol=1e-5, atol=1e-5)
    assert_close(distillation("Reverse").advantage(returns, mask, **given) * mask, (expected - alone) * mask)


def test_sampled_advantages_have_the_mean_of_the_reverse_kl() -> None:
    student, teacher = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.1, 0.3, 0.6]])
    advantages = distillation("Sampled").advantage(
        torch.zeros(3),
        torch.ones(3, 1),
        rows=slice(0, 3),
        group_size=1,
        teacher_log_probs=teacher.log().T,
        old_log_probs=student.log().T,
    )
    assert_close(-(student.T * advantages).sum(), distillation("Reverse").compare(student.log(), teacher.log())[0])


@pytest.fixture(params=[1, 4, 100])
def rows_of_a_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CPU_CHUNK_LOGITS", V * request.param)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("rows_of_a_chunk")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("count", [V, 3])
@pytest.mark.parametrize("case", OPTIONS)
def test_divergence_and_gradients_are_the_plain_formulas(case: str, count: int, softcap: float | None) -> None:
    """A teacher with other hidden states of another width; all but the K likeliest tokens are one."""
    temperature, upstream = torch.linspace(0.5, 2.0, N), torch.linspace(-1.0, 2.0, N)
    of_teacher, weight_of_teacher = drawn(N, 2 * H, seed=1), drawn(V, 2 * H, seed=2)
    hidden, weight = drawn(N, H, seed=3).requires_grad_(), drawn(V, H, seed=4).requires_grad_()

    def probabilities(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight.T
        return ((softcap * torch.tanh(logits / softcap) if softcap else logits) / temperature[:, None]).softmax(1)

    teacher, student = probabilities(of_teacher, weight_of_teacher), probabilities(hidden, weight)
    ids = teacher.topk(count).indices
    compared = [each.gather(1, ids) for each in (student, teacher)]
    if count < V:
        compared = [torch.cat([each, 1.0 - each.sum(1, keepdim=True)], 1) for each in compared]
    expected = plain(case, *compared)

    tokens = likeliest_tokens(of_teacher, weight_of_teacher, temperature, count=count, of=V, softcap=softcap)
    compare = distillation(case).compare
    found = divergence_from(tokens, hidden, weight, temperature, compare=compare, softcap=softcap)
    assert_close(found, expected, rtol=1e-4, atol=1e-6)
    gradients = (torch.autograd.grad((each * upstream).sum(), [hidden, weight]) for each in (found, expected))
    assert_close(*gradients, rtol=1e-4, atol=2e-6)


def test_a_token_that_only_one_of_them_can_write_is_no_nan() -> None:
    student, teacher = torch.tensor([[0.0, -200.0]]), torch.tensor([[-200.0, 0.0]])
    for case in OPTIONS:
        assert torch.isfinite(distillation(case).compare(student, teacher)).all(), case


def test_the_likeliest_tokens_are_among_those_of_the_tokenizer() -> None:
    """A model's vocabulary may have more entries than its tokenizer, and than the student's."""
    weight = torch.eye(4)
    tokens = likeliest_tokens(torch.tensor([[1.0, 3.0, 2.0, 9.0]]), weight, torch.ones(1), count=2, of=3, softcap=None)
    assert tokens[0, :2].tolist() == [1.0, 2.0]
    assert_close(tokens[0, 2:], torch.tensor([1.0, 3.0, 2.0, 9.0]).log_softmax(0)[[1, 2]])


def test_where_nothing_is_read_nothing_is_compared() -> None:
    weight = drawn(V, H, seed=4).requires_grad_()
    empty = torch.zeros(0, H, requires_grad=True)
    tokens = likeliest_tokens(empty, weight, torch.zeros(0), count=3, of=V, softcap=None)
    assert tokens.shape == (0, 6)
    compare = distillation("Reverse").compare
    found = divergence_from(tokens, empty, weight, torch.zeros(0), compare=compare, softcap=None)
    assert found.shape == (0,)
