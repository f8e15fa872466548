"""Rows that are trees of tokens: their branches, what is packed of them, and what they cost."""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from rlhf_trainer.training.batching import Bundles, RowCosts
from rlhf_trainer.training.branches import branches_of, indices_of, runs_of
from rlhf_trainer.training.model_input import Documents, ModelInput, TokenBatch
from rlhf_trainer.types import PARENTS, Batch, Fields
from rlhf_trainer.workers.samples import sample_of, turns_of
from tests.trainer.tiny import EXAMPLE_MODEL, tiny_config
from tests.trainer.trees import as_rows, branches_by_definition, distinct_prefixes, trees
from tests.trainer.unit.test_rows_that_begin_alike_are_computed_together import random_texts

TREE = [-1, 0, 1, 2, 1, 4, -1, 6, 2]
"""Token 1 is followed by 2 and 4, and 2 by 3 and 8; a second root is 6."""


def text_of_trees(fields: Fields) -> TokenBatch:
    lengths = fields["attention_mask"].sum(1).long()
    return TokenBatch(tokens=fields["tokens"], lengths=lengths, parents=fields[PARENTS], read=fields["attention_mask"])


def test_branches_end_where_no_token_follows() -> None:
    found = [indices_of(runs).tolist() for runs in runs_of(torch.tensor([*TREE, 7, 7]), len(TREE))]
    assert found == [[0, 1, 2, 3], [0, 1, 4, 5], [6, 7], [0, 1, 2, 8]]


def test_a_row_without_parents_is_one_branch() -> None:
    batch = Batch(step=1, start=0, size=1, fields={"attention_mask": torch.tensor([[1.0, 1.0, 0.0]])})
    assert [each.tolist() for each in branches_of(batch, 0)] == [[0, 1]]
    chain = batch.with_fields({PARENTS: torch.tensor([[-1, 0, 0]])})
    assert [each.tolist() for each in branches_of(chain, 0)] == [[0, 1]]


def test_a_token_follows_an_earlier_one() -> None:
    with pytest.raises(AssertionError, match="has a lower index"):
        runs_of(torch.tensor([-1, 2, 1]), 3)


def test_branches_of_random_trees_are_those_of_the_definition() -> None:
    for seed in range(50):
        fields = trees(seed)
        batch = Batch(step=1, start=0, size=len(fields["tokens"]), fields=fields)
        for row, size in enumerate(fields["attention_mask"].sum(1).int().tolist()):
            expected = branches_by_definition(fields[PARENTS][row, :size].tolist()) or [[]]
            assert [each.tolist() for each in branches_of(batch, row)] == expected


def test_a_tree_is_packed_once_and_read_at_its_places() -> None:
    for seed in range(50):
        fields = trees(seed)
        text = text_of_trees(fields)
        given, whole = (ModelInput.of([text], share=share) for share in (True, False))
        rows, at = as_rows(fields)
        depth = torch.arange(at.shape[1]).expand_as(at)
        assert given.tokens.numel() == distinct_prefixes(fields) < int(text.lengths.sum()), "rows share a prompt"
        assert whole.tokens.numel() == int(rows["attention_mask"].sum()), "each branch alone"
        for each in (given, whole):
            assert torch.equal(each.whole, fields["attention_mask"].flatten().nonzero()[:, 0])
            assert torch.equal(each.tokens[0, each.packed], text.tokens[fields["attention_mask"] > 0])
            positions = torch.zeros(text.tokens.numel(), dtype=torch.int64)
            positions[at[at >= 0]] = depth[at >= 0]
            assert torch.equal(each.positions[0, each.packed], positions[each.whole])
            follows = (fields["attention_mask"] > 0) & (fields[PARENTS] >= 0)
            assert torch.equal(each.places, follows.flatten().nonzero()[:, 0]), "nothing predicts a first token"
            before = text.tokens.gather(1, fields[PARENTS].clamp(min=0))
            assert torch.equal(each.tokens[0, each.before], before[follows])


def test_a_tree_of_one_branch_is_a_row_as_any_other() -> None:
    for seed in range(100):
        texts = random_texts(seed)
        for share in (True, False):
            chains = [replace(each, parents=(torch.arange(16) - 1).expand_as(each.tokens)) for each in texts]
            require_equal(ModelInput.of(chains, share=share), ModelInput.of(texts, share=share))


def require_equal(one: ModelInput | Documents, other: ModelInput | Documents) -> None:
    for each in fields_of(one):
        found, expected = getattr(one, each.name), getattr(other, each.name)
        if isinstance(found, Documents):
            require_equal(found, expected)
        elif isinstance(found, Tensor):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected), each.name
        else:
            assert found == expected, each.name


def test_a_short_prefix_is_shared_inside_a_row() -> None:
    """Rows share no prefix below a sixteenth of the text; the branches of a row share each."""
    tokens = torch.arange(100, 141)[None]
    parents = torch.tensor([-1, *range(20), 0, *range(21, 40)])[None]
    text = TokenBatch(tokens=tokens, lengths=torch.tensor([41]), parents=parents)
    assert ModelInput.of([text]).tokens.numel() == 41
    assert Bundles.of([text], token_budget=1).tokens.tolist() == [41]


def test_bundles_count_what_is_packed() -> None:
    for seed in range(50):
        text = text_of_trees(trees(seed))
        for share in (True, False):
            bundles = Bundles.of([text], token_budget=50 + seed, share=share)
            for number, tokens in enumerate(bundles.tokens.tolist()):
                rows = bundles.rows(torch.tensor([number]))
                assert text.parents is not None
                part = replace(
                    text, tokens=text.tokens[rows], lengths=text.lengths[rows], parents=text.parents[rows], read=None
                )
                given = ModelInput.of([part], share=share)
                assert given.tokens.numel() - given.padding == tokens
                assert len(rows) == 1 or tokens <= 50 + seed


def test_attention_costs_what_the_branches_see() -> None:
    """The token at place n of a branch is multiplied with n keys and values; tokens 0 to 8 lie at 1 2 3 4 3 4 1 2 4."""
    costs = RowCosts(AutoModelForCausalLM.from_config(tiny_config()))
    one = int(costs.of(torch.tensor(1)))
    attention = (int(costs.of(torch.tensor(2))) - 2 * one) // 2
    text = TokenBatch(tokens=torch.arange(9)[None], lengths=torch.tensor([9]), parents=torch.tensor([TREE]))
    bundles = Bundles.of([text], token_budget=100)
    found = bundles.sums(costs.of(bundles.lengths) - costs.of(bundles.shared))
    pairs = sum(2 * place - 1 for place in (1, 2, 3, 4, 3, 4, 1, 2, 4))
    assert found.tolist() == [9 * (one - attention) + attention * pairs]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(EXAMPLE_MODEL))
    return found


def episode(tokenizer: PreTrainedTokenizerBase, parts: list[tuple[str, int, bool]]) -> tuple[Batch, list[list[int]]]:
    """A row of parts (text, part that it follows or -1, whether the model wrote it), and the tokens of each part."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _, _ in parts]
    starts = [sum(map(len, ids[:part])) for part in range(len(ids) + 1)]
    parents = [
        (starts[parent + 1] - 1 if parent >= 0 else -1) if token == start else token - 1
        for (_, parent, _), start, stop in zip(parts, starts[:-1], starts[1:], strict=True)
        for token in range(start, stop)
    ]
    written = [float(is_written) for (_, _, is_written), part in zip(parts, ids, strict=True) for _ in part]
    fields = {
        "tokens": torch.tensor([[token for part in ids for token in part]]),
        "attention_mask": torch.ones(1, starts[-1]),
        "response_mask": torch.tensor([written]),
        "turn_rewards": torch.zeros(1, starts[-1]),
        "finished": torch.ones(1),
        "valid": torch.ones(1),
        PARENTS: torch.tensor([parents]),
    }
    return Batch(step=1, start=0, size=1, fields=fields), ids


def test_the_last_branch_is_what_is_scored(tokenizer: PreTrainedTokenizerBase) -> None:
    """The second answer is a retry of the first, and the third goes on with the retry."""
    parts = [(" How do I", -1, False), (" clean it", 0, True), (" wipe the lamp", 0, True)]
    parts += [(" Say more", 2, False), (" First, wipe it", 3, True)]
    batch, ids = episode(tokenizer, parts)
    sample = sample_of(batch, 0, tokenizer)
    assert sample.prompt == tokenizer.decode([*ids[0], *ids[2], *ids[3]])
    assert sample.response == tokenizer.decode(ids[4]) != ""
    turns = turns_of(batch, 0, tokenizer)
    assert [turn["text"] for turn in turns] == [tokenizer.decode(each) for each in ids[1:]]
    assert [turn["written"] for turn in turns] == [True, True, False, True]
