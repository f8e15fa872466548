"""Rows that are random trees of tokens, and the texts that their branches are, found token by token."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_trainer.types import PARENTS, Fields

SIZES, PROMPT = (17, 30, 1, 0, 24, 9, 12, 21), 4
"""Tokens of the rows, and of the prompt that rows 0, 1 and 4 have in common."""
VOCABULARY = 512


def trees(seed: int) -> dict[str, Tensor]:
    """Rows of different tokens but for the prompt; row 5 is one text. Two of three tokens are a response's."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(SIZES), max(SIZES)
    attention = (torch.arange(width) < torch.tensor(SIZES)[:, None]).float()
    tokens, parents = torch.zeros(rows, width, dtype=torch.int64), torch.full((rows, width), -1)
    tokens[attention > 0] = torch.randperm(VOCABULARY - 3, generator=generator)[: sum(SIZES)] + 3
    tokens[[1, 4], :PROMPT] = tokens[0, :PROMPT]
    for row, size in enumerate(SIZES):
        parents[row, :size] = torch.tensor(random_parents(size, generator, branches=row != 5), dtype=torch.int64)
    response = attention * (torch.rand(attention.shape, generator=generator) < 2 / 3) * (parents >= 0)
    return {"tokens": tokens, "attention_mask": attention, "response_mask": response, PARENTS: parents}


def random_parents(size: int, generator: torch.Generator, *, branches: bool) -> list[int]:
    """Most tokens follow the one before them, others any earlier one, or none."""
    parents: list[int] = []
    for token in range(size):
        kind = int(torch.randint(10, (1,), generator=generator)) if branches and token >= PROMPT else 0
        earlier = int(torch.randint(max(token, 1), (1,), generator=generator))
        parents.append(token - 1 if kind < 7 else earlier if kind < 9 else -1)
    return parents


def branches_by_definition(parents: Sequence[int]) -> list[list[int]]:
    """From each token that no other follows back to a first one; by the first of these."""
    found = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        branch = [leaf]
        while parents[branch[0]] >= 0:
            branch.insert(0, parents[branch[0]])
        found.append(branch)
    return found


def as_rows(fields: Fields) -> tuple[dict[str, Tensor], Tensor]:
    """(the fields with a row for each branch, at [rows, T]: index of each token among the trees' rows * T positions).

    What another row has before, as padding, has no index (-1), and is no response.
    """
    width, branches = fields["tokens"].shape[1], list[tuple[int, list[int]]]()
    for row, size in enumerate(fields["attention_mask"].sum(1).int().tolist()):
        branches += [(row, each) for each in branches_by_definition(fields[PARENTS][row, :size].tolist())]
    longest = max(len(branch) for _, branch in branches)
    at, known = torch.full((len(branches), longest), -1), set[int]()
    for number, (row, branch) in enumerate(branches):
        for column, token in enumerate(branch):
            place = row * width + token
            at[number, column] = -1 if place in known else place
            known.add(place)
    return {
        **{name: gathered(field, branches, longest) for name, field in fields.items() if name != PARENTS},
        "response_mask": gathered(fields["response_mask"], branches, longest) * (at >= 0),
    }, at


def gathered(field: Tensor, branches: Sequence[tuple[int, list[int]]], longest: int) -> Tensor:
    """[B, T, ...] -> [branches, longest, ...]."""
    ends = (0, 0) * (field.dim() - 2)
    return torch.stack([pad(field[row, each], (*ends, 0, longest - len(each))) for row, each in branches])


def distinct_prefixes(fields: Mapping[str, Tensor]) -> int:
    """Number of different beginnings of all branches: the tokens that need be computed."""
    rows, _ = as_rows(fields)
    sizes = rows["attention_mask"].sum(1).int().tolist()
    texts = [row[:size].tolist() for row, size in zip(rows["tokens"], sizes, strict=True)]
    return len({tuple(text[: stop + 1]) for text in texts for stop in range(len(text))})
