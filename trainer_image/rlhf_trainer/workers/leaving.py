"""Rows of a batch that leave their generator before the longest of them has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_api.spec.rollout import STREAM_SHARES, stream_groups
from rlhf_trainer.data.tokens import Ids
from rlhf_trainer.generation.vllm_engine import Response
from rlhf_trainer.row_groups import Outlet, RowGroup
from rlhf_trainer.types import Batch

Ended = Callable[[int, Ids, Response], None]
"""Is told of a row of the batch: its number on this rank, its prompt, and the response that has ended."""


class Leaving:
    """Sends this rank's rows off in groups, in the order in which they end."""

    def __init__(self, outlet: Outlet | None, batch: Batch, laid_out: Callable[..., dict[str, Tensor]]) -> None:
        """laid_out: (rows, prompts, responses, width) -> their fields."""
        self._outlet, self._start, self._laid_out = outlet, batch.start, laid_out
        self._sizes = deque(len(rows) for rows in stream_groups(batch.size))
        self._ended: list[tuple[int, Ids, Response]] = []

    def add(self, row: int, prompt: Ids, response: Response) -> None:
        """A row has ended; the last group waits for `end`."""
        self._ended.append((row, prompt, response))
        while self._outlet and len(self._sizes) > 1 and len(self._ended) >= self._sizes[0]:
            self._put()

    def end(self, width: int) -> None:
        """All rows have ended, and the batch is so wide."""
        while self._outlet and self._sizes:
            self._put(width)

    def _put(self, width: int = 0) -> None:
        assert self._outlet
        size = self._sizes.popleft()
        ended, self._ended = self._ended[:size], self._ended[size:]
        rows, prompts, responses = [list(each) for each in zip(*ended, strict=True)] or ([], [], [])
        longest = max((len(prompt) + len(each.tokens) for _, prompt, each in ended), default=1)
        group = RowGroup(
            rows=torch.tensor(rows, dtype=torch.int64) + self._start,
            fields=self._laid_out(rows, prompts, responses, longest),
            width=width,
        )
        self._outlet.put(len(STREAM_SHARES) - 1 - len(self._sizes), group)
