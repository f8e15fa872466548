"""A row that is a tree gives what its branches give as rows of their own, and learns the same."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_trainer.training import attention
from rlhf_trainer.training.model_input import ModelInput, TokenBatch
from rlhf_trainer.training.models import LanguageModel, Scorer
from rlhf_trainer.types import PARENTS, Fields
from tests.trainer.training.test_packed_texts_are_read_as_if_alone import (
    CONFIGS,
    pair,
    ready,
    require_same_gradients,
    varlen_attention_by_definition,
)
from tests.trainer.training.test_routing_is_replayed import drawn_experts
from tests.trainer.training.test_routing_is_replayed import pair as pair_of_mixtures
from tests.trainer.trees import VOCABULARY, as_rows, trees

KINDS = 5


def texts_in(fields: Fields, **options: Any) -> TokenBatch:
    """Rows of which the responses are read."""
    lengths = fields["attention_mask"].sum(1).long()
    given: dict[str, Any] = {"read": fields["response_mask"], "temperature": 0.5, "entropy": True} | options
    return TokenBatch(tokens=fields["tokens"], lengths=lengths, parents=fields.get(PARENTS), **given)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "whole"])
@pytest.mark.parametrize(
    ("name", "by"), [("llama", "SDPA"), ("llama", "Flash"), ("a window of 4 tokens", "SDPA")], ids=str
)
def test_log_probs_and_gradients_are_those_of_each_branch(
    name: str, by: str, share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = pair(CONFIGS[name])
    model = ready(LanguageModel(own))
    own.config._attn_implementation = attention.NAMES[by]
    monkeypatch.setattr(attention, "varlen_attn", varlen_attention_by_definition)
    fields = trees(1)
    given = ModelInput.of([texts_in(fields)], share=share, at_least=500)
    found = model(given.tokens, given)
    rows, at = as_rows(fields)
    expected, entropy = torch.zeros(fields["tokens"].numel()), torch.zeros(fields["tokens"].numel())
    for row, length in enumerate(rows["attention_mask"].sum(1).int().tolist()):
        tokens = rows["tokens"][row : row + 1, :length]
        spread = (other(tokens).logits[0, :-1] / 0.5).log_softmax(1)
        read = rows["response_mask"][row, 1:length] > 0
        places = at[row, 1:length][read]
        expected[places] = spread.gather(1, tokens[0, 1:, None])[:, 0][read]
        entropy[places] = -(spread.exp() * spread).sum(1)[read]
    assert int((expected != 0).sum()) == int(fields["response_mask"].sum()), "each token is read once"
    assert_close(found.log_probs, expected.view(found.log_probs.shape), atol=1e-5, rtol=1e-5)
    assert_close(found.entropy, entropy.view(found.entropy.shape), atol=1e-5, rtol=1e-5)
    require_same_gradients(own, other, found.log_probs, expected.view(found.log_probs.shape))


def test_tokens_that_nothing_is_learned_from_have_no_gradient() -> None:
    own, _ = pair(CONFIGS["llama"])
    fields = trees(2)
    given = ModelInput.of([texts_in(fields)])
    found = ready(LanguageModel(own))(given.tokens, given)
    masked = fields["response_mask"] == 0
    assert not found.log_probs[masked].any()
    torch.autograd.backward(found.log_probs[masked].sum() + found.entropy[masked].sum())
    assert all(each.grad is not None and not each.grad.any() for each in own.parameters())


def with_teacher(fields: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    shape = (*fields["tokens"].shape, VOCABULARY)
    likeliest = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).log_softmax(2).topk(KINDS)
    return {**fields, "teacher_tokens": torch.cat([likeliest.indices.float(), likeliest.values], 2)}


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    return (teacher.exp() * (teacher - student)).sum(-1)


def outputs_of(model: Any, texts: list[TokenBatch], *, share: bool) -> list[Tensor]:
    """The outputs of each text, [rows, T] each."""
    given = ModelInput.of(texts, share=share, at_least=3)
    output = model(given.tokens, given)
    found = [each for each in output if each is not None] if isinstance(model, LanguageModel) else [output]
    rows = [len(text.tokens) for text in texts]
    return [
        part[:, : text.tokens.shape[1]] for each in found for part, text in zip(each.split(rows), texts, strict=True)
    ]


def require_branches_as_rows(model: LanguageModel | Scorer, seed: int, *, share: bool) -> None:
    """Beside a text that is no tree, as pretraining texts are; by losses that weigh a token alike in both ways."""
    fields = with_teacher(trees(seed), seed)
    rows, at = as_rows(fields)
    weights = torch.randn(fields["tokens"].numel(), generator=torch.Generator().manual_seed(seed))
    of_rows = torch.where(at >= 0, weights[at.clamp(min=0)], 0.0)
    options = [{"teacher": each["teacher_tokens"], "compare": forward_kl} for each in (fields, rows)]
    if isinstance(model, Scorer):
        options = [{"read": None, "entropy": False}] * 2
    tree, alone = (texts_in(each, **more) for each, more in zip((fields, rows), options, strict=True))
    read = None if isinstance(model, Scorer) else fields["attention_mask"].flip(0)
    plain = replace(tree, tokens=tree.tokens.flip(0), lengths=tree.lengths.flip(0), parents=None, read=read)
    both = outputs_of(model, [tree, plain], share=share)
    found, beside = both[::2], both[1::2]
    expected, expected_beside = outputs_of(model, [alone], share=False), outputs_of(model, [plain], share=False)
    for each, other in zip(found, expected, strict=True):
        assert_close(each.flatten()[at[at >= 0]], other[at >= 0], atol=2e-5, rtol=2e-5)
    assert_close(beside, expected_beside, atol=2e-5, rtol=2e-5)
    gradients = []
    for outputs, weight, others in ((found, weights.view_as(found[0]), beside), (expected, of_rows, expected_beside)):
        model.zero_grad()
        terms = [*((each * weight).sum() for each in outputs), *(each.sum() for each in others)]
        torch.autograd.backward(torch.stack(terms).sum())
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_close(*gradients, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "whole"])
@pytest.mark.parametrize("kind", ["a language model", "a window of 4 tokens", "a scorer"])
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 60), marks=pytest.mark.slow)], ids=["3", "many"])
def test_random_trees_are_read_as_their_branches_are(kind: str, seeds: range, share: bool) -> None:
    torch.manual_seed(0)
    config = deepcopy(CONFIGS[kind if kind in CONFIGS else "llama"])
    config.num_labels = 1
    is_scorer = kind == "a scorer"
    factory: Any = AutoModelForSequenceClassification if is_scorer else AutoModelForCausalLM
    model = ready((Scorer if is_scorer else LanguageModel)(factory.from_config(config)))
    for seed in seeds:
        require_branches_as_rows(model, seed, share=share)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "whole"])
def test_replayed_experts_go_with_the_tokens_of_a_branch(share: bool) -> None:
    model, plain, _ = pair_of_mixtures("Qwen3-MoE")
    fields = trees(3)
    lengths = fields["attention_mask"].sum(1).long()
    fields["experts"] = drawn_experts(plain.config, lengths + 1, fields["tokens"].shape[1])
    fields["experts"][[1, 4], :4] = fields["experts"][0, :4]
    rows, at = as_rows(fields)
    tree, alone, moved = (
        texts_in(each, experts=experts, entropy=False)
        for each, experts in (
            (fields, fields["experts"]),
            (rows, rows["experts"]),
            (fields, fields["experts"].roll(1, 1)),
        )
    )
    (expected,), (found,), (other,) = (
        outputs_of(model, [replace(each, entropy=False)], share=is_shared)[:1]
        for each, is_shared in ((alone, False), (tree, share), (moved, share))
    )
    assert_close(found.flatten()[at[at >= 0]], expected[at >= 0], atol=2e-5, rtol=2e-5)
    assert float((other - found).detach().abs().max()) > 0.01, "other experts give other probabilities"
