"""Bundles: rows with one prompt, whose tokens count once, and which the token budget may divide."""

import torch
from torch import Tensor

from rlhf_trainer.training.batching import Bundles
from rlhf_trainer.training.model_input import ModelInput, TokenBatch

PROMPTS: tuple[list[int], ...] = ([7, 8, 9], [7, 8, 9], [7, 8, 5], [7, 8, 9], [7, 8], [], [])
OWN = [4, 2, 5, 6, 3, 4, 2]


def text(prompts: tuple[list[int], ...] = PROMPTS, own: list[int] = OWN, *, first: int = 100) -> TokenBatch:
    """Rows of a prompt and so many further tokens, all different."""
    rows = [
        [*prompt, *range(first + 10 * row, first + 10 * row + size)]
        for row, (prompt, size) in enumerate(zip(prompts, own, strict=True))
    ]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for row, each in enumerate(rows):
        tokens[row, : len(each)] = torch.tensor(each)
    return TokenBatch(tokens=tokens, lengths=torch.tensor(list(map(len, rows))))


def cut(texts: list[TokenBatch], rows: Tensor) -> list[TokenBatch]:
    return [TokenBatch(tokens=each.tokens[rows], lengths=each.lengths[rows]) for each in texts]


def bundled(texts: list[TokenBatch], budget: int) -> tuple[list[list[int]], list[int]]:
    """(rows, tokens) of each bundle, which are as many as are then packed."""
    bundles = Bundles.of(texts, token_budget=budget)
    rows = [bundles.rows(torch.tensor([number])) for number in range(len(bundles.tokens))]
    assert [ModelInput.of(cut(texts, each)).tokens.numel() for each in rows] == bundles.tokens.tolist()
    return [each.tolist() for each in rows], bundles.tokens.tolist()


def test_equal_prompts_are_a_bundle_others_are_alone() -> None:
    assert bundled([text()], 1000) == ([[0, 1, 3], [2], [4], [5], [6]], [3 + 4 + 2 + 6, 8, 5, 4, 2])


def test_rows_of_an_unknown_prompt_are_alone() -> None:
    whole = text()
    alone = TokenBatch(tokens=whole.tokens, lengths=whole.lengths)
    assert bundled([alone], 1000) == ([[row] for row in range(7)], whole.lengths.tolist())


def test_too_many_tokens_are_several_bundles() -> None:
    assert bundled([text()], 9) == ([[0, 1], [2], [3], [4], [5], [6]], [3 + 4 + 2, 8, 3 + 6, 5, 4, 2])
    assert bundled([text()], 1) == ([[row] for row in range(7)], text().lengths.tolist())


def test_texts_of_a_row_share_their_prompt_too() -> None:
    both = [text(), text(own=[1] * 7, first=500)]
    assert bundled(both, 1000) == ([[0, 1, 3], [2], [4], [5], [6]], [15 + 3, 8 + 1, 5 + 1, 4 + 1, 2 + 1])


def test_what_a_second_text_shares_by_itself_counts_once_too() -> None:
    other = text(([1, 2], [3, 4], [1, 2], [1, 2], [], [], []), [2] * 7, first=500)
    assert bundled([text(), other], 1000)[1] == [15 + 4 + 4 + 2, 8 + 4, 5 + 2, 4 + 2, 2 + 2]


def test_a_prompt_small_beside_its_row_is_not_shared() -> None:
    first_token = text(([1], [1], [1]), [15, 16, 16])
    assert bundled([first_token], 1000) == ([[0], [1], [2]], [16, 17, 17])
    assert bundled([text(([1], [1]), [15, 15])], 1000) == ([[0, 1]], [16 + 15])


def test_without_rows_there_is_no_bundle() -> None:
    nothing = TokenBatch(tokens=torch.zeros(0, 3, dtype=torch.int64), lengths=torch.zeros(0, dtype=torch.int64))
    assert Bundles.of([nothing], token_budget=9).tokens.tolist() == []
