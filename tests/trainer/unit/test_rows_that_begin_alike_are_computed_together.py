"""Bundles: rows that begin alike, whose common tokens count once, and which the token budget may divide."""

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
    packed = [ModelInput.of(cut(texts, each)) for each in rows]
    assert [each.tokens.numel() - each.padding for each in packed] == bundles.tokens.tolist()
    return [each.tolist() for each in rows], bundles.tokens.tolist()


def turns(*sizes: int) -> TokenBatch:
    """A row for each number of the first tokens of one text."""
    return TokenBatch(tokens=torch.arange(1, max(sizes) + 1).repeat(len(sizes), 1), lengths=torch.tensor(sizes))


def test_rows_that_begin_alike_are_a_bundle_others_are_alone() -> None:
    """Rows 0, 1 and 3 begin with 7 8 9, and rows 2 and 4 with 7 8."""
    assert bundled([text()], 1000) == ([[0, 1, 2, 3, 4], [5], [6]], [3 + 4 + 2 + 6 + 1 + 5 + 3, 4, 2])


def test_rows_that_may_not_share_are_alone() -> None:
    alone = Bundles.of([text()], token_budget=1000, share=False)
    assert alone.of_rows.tolist() == list(range(7))
    assert alone.tokens.tolist() == text().lengths.tolist()
    assert ModelInput.of([text()], share=False).tokens.numel() == int(text().lengths.sum())


def test_too_many_tokens_are_several_bundles() -> None:
    assert bundled([text()], 9) == ([[0, 1], [2], [3], [4], [5], [6]], [3 + 4 + 2, 8, 3 + 6, 5, 4, 2])
    assert bundled([text()], 1) == ([[row] for row in range(7)], text().lengths.tolist())


def test_turns_of_an_episode_are_the_tokens_of_its_last() -> None:
    assert bundled([turns(4, 9, 15, 22)], 1000) == ([[0, 1, 2, 3]], [22])
    assert bundled([turns(15, 22, 4, 9)], 1000) == ([[0, 1, 2, 3]], [22]), "in any order of the rows"
    assert bundled([turns(15, 22, 4, 9)], 15) == ([[0, 2, 3], [1]], [15, 22])


def test_equal_texts_are_computed_once() -> None:
    assert bundled([turns(9, 9, 9)], 1000) == ([[0, 1, 2]], [9])
    assert bundled([turns(9), turns(9)], 1000) == ([[0]], [9])


def test_texts_of_a_row_share_too() -> None:
    both = [text(), text(own=[1] * 7, first=500)]
    assert bundled(both, 1000) == ([[0, 1, 2, 3, 4], [5], [6]], [24 + 5, 4 + 1, 2 + 1])


def test_what_a_second_text_shares_by_itself_counts_once_too() -> None:
    other = text(([1, 2], [3, 4], [1, 2], [1, 2], [], [], []), [2] * 7, first=500)
    assert bundled([text(), other], 1000)[1] == [24 + (2 + 3 * 2) + 4 + 2, 4 + 2, 2 + 2]


def test_a_prefix_small_beside_its_row_is_not_shared() -> None:
    first_token = text(([1], [1], [1]), [15, 16, 16])
    assert bundled([first_token], 1000) == ([[0], [1], [2]], [16, 17, 17])
    assert bundled([text(([1], [1]), [15, 15])], 1000) == ([[0, 1]], [16 + 15])


def test_without_rows_there_is_no_bundle() -> None:
    nothing = TokenBatch(tokens=torch.zeros(0, 3, dtype=torch.int64), lengths=torch.zeros(0, dtype=torch.int64))
    assert Bundles.of([nothing], token_budget=9).tokens.tolist() == []


def random_texts(seed: int) -> list[TokenBatch]:
    """Return one or two texts of rows with up to 16 tokens of three kinds, so that many rows begin alike."""
    chosen = torch.Generator().manual_seed(seed)
    rows, texts = seed % 9 + 1, seed % 2 + 1
    return [
        TokenBatch(
            tokens=torch.randint(1, 4, (rows, 16), generator=chosen),
            lengths=torch.randint(0, 17, (rows,), generator=chosen),
        )
        for _ in range(texts)
    ]


def test_each_prefix_is_packed_once_where_its_texts_read_it() -> None:
    for seed in range(500):
        texts = random_texts(seed)
        given = ModelInput.of(texts)
        every = [row[:size].tolist() for each in texts for row, size in zip(each.tokens, each.lengths, strict=True)]
        prefixes = {tuple(row[: stop + 1]) for row in every for stop in range(len(row))}
        assert given.tokens.numel() - given.padding == len(prefixes), seed
        tokens, places = torch.cat([each.tokens for each in texts]), given.whole
        assert torch.equal(given.tokens[0, given.packed], tokens.flatten()[places])
        assert torch.equal(given.positions[0, given.packed], places % 16)
        rows = torch.split(given.packed, list(map(len, every)))
        documents, seen = given.documents, given.documents.seen_tokens
        if seen is not None:
            found = torch.split(seen, list(documents.seen))
            assert all(
                any(torch.equal(each, row) for row in rows) for each in found[: len(found) - (given.padding > 0)]
            )


def test_bundles_keep_to_their_budget_and_their_tokens() -> None:
    for seed in range(200):
        texts, budget = random_texts(seed), 1 + seed % 60
        for rows, tokens in zip(*bundled(texts, budget), strict=True):
            assert tokens <= budget or len(rows) == 1
