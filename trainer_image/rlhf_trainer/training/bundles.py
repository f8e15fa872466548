"""Rows that share a prompt are bundled: they are computed by one rank and in one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf_trainer.training.model_input import Text, prompt_keys, prompt_sizes


@dataclass(frozen=True)
class Bundles:
    """The bundles of the rows [B] of some texts, numbered from 0."""

    of_rows: Tensor
    """int64 [B]: the bundle of each row."""
    lengths: Tensor
    """int64 [texts, B]."""
    shared: Tensor
    """int64 [texts, B]: tokens of each row that another text of its bundle computes."""

    @classmethod
    def of(cls, texts: Sequence[Text], *, token_budget: int) -> Bundles:
        """Rows whose first text has one prompt; more than token_budget tokens of them are several bundles."""
        lengths = torch.stack([text.lengths for text in texts])
        totals, sizes = lengths.sum(0).tolist(), torch.stack(list(map(prompt_sizes, texts))).T.tolist()
        begun: list[_Bundle] = []
        newest: dict[bytes, _Bundle] = {}
        for row, keys in enumerate(zip(*map(prompt_keys, texts), strict=True)):
            bundle = newest.get(keys[0])
            if bundle is None or bundle.tokens + totals[row] - sum(bundle.shared(keys, sizes[row])) > token_budget:
                begun.append(bundle := _Bundle())
                if keys[0]:
                    newest[keys[0]] = bundle
            bundle.add(row, keys, sizes[row], totals[row])
        of_rows, shared = torch.empty(len(totals), dtype=torch.int64), torch.empty_like(lengths)
        for number, bundle in enumerate(begun):
            of_rows[bundle.rows] = number
            shared[:, bundle.rows] = torch.tensor(bundle.taken).T
        return cls(of_rows, lengths, shared)

    def sums(self, values: Tensor) -> Tensor:
        """values int64 [texts, B] summed over the rows of each bundle: [bundles]."""
        count = int(self.of_rows.max()) + 1 if len(self.of_rows) else 0
        return values.new_zeros(count).index_add(0, self.of_rows, values.sum(0))

    @property
    def tokens(self) -> Tensor:
        """int64 [bundles]: tokens that are computed."""
        return self.sums(self.lengths - self.shared)

    def rows(self, numbers: Tensor) -> Tensor:
        """int64: the rows of bundles, in their order."""
        return torch.isin(self.of_rows, numbers).nonzero()[:, 0]


@dataclass
class _Bundle:
    """A bundle that is being filled."""

    rows: list[int] = field(default_factory=list)
    taken: list[list[int]] = field(default_factory=list)
    """Tokens of each text of each row that another one computes."""
    tokens: int = 0
    """That are computed."""
    prompts: set[bytes] = field(default_factory=set)

    def shared(self, keys: Sequence[bytes], sizes: Sequence[int]) -> list[int]:
        """Tokens of each text of a further row that another one computes; sizes: of the texts' prompts."""
        return [
            size if key in self.prompts or key in keys[:text] else 0
            for text, (key, size) in enumerate(zip(keys, sizes, strict=True))
        ]

    def add(self, row: int, keys: Sequence[bytes], sizes: Sequence[int], total: int) -> None:
        """A row whose texts have so many tokens together."""
        self.taken.append(self.shared(keys, sizes))
        self.rows.append(row)
        self.tokens += total - sum(self.taken[-1])
        self.prompts.update(keys)
