"""Stream of a batch's rows, which leave their generator before the longest response has ended."""

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

ResponseEnded = Callable[[int, Ids, Response], None]
"""Callback for each response that has ended: it gets the row's number on this rank, its prompt and the response."""
LayOut = Callable[[list[int], list[Ids], list[Response], int], dict[str, Tensor]]
"""Function (rows, prompts, responses, width) -> fields of these rows, padded to `width`."""


class RowStream:
    """Stream of this rank's rows into an outlet: groups of rows in the order in which their responses end."""

    def __init__(self, outlet: Outlet | None, batch: Batch, lay_out: LayOut) -> None:
        """outlet: None: the stream sends nothing; lay_out: makes the fields of a group's rows."""
        self._outlet, self._start, self._lay_out = outlet, batch.start, lay_out
        self._sizes = deque(len(rows) for rows in stream_groups(batch.size))
        self._ended: list[tuple[int, Ids, Response]] = []

    def add(self, row: int, prompt: Ids, response: Response) -> None:
        """Add a row whose response has ended; the last group waits for `close`."""
        self._ended.append((row, prompt, response))
        while self._outlet and len(self._sizes) > 1 and len(self._ended) >= self._sizes[0]:
            self._send_group()

    def close(self, width: int) -> None:
        """Send the remaining groups; all rows have ended, and `width` is that of the batch."""
        while self._outlet and self._sizes:
            self._send_group(width)

    def _send_group(self, width: int = 0) -> None:
        assert self._outlet
        size = self._sizes.popleft()
        ended, self._ended = self._ended[:size], self._ended[size:]
        rows, prompts = [row for row, _, _ in ended], [prompt for _, prompt, _ in ended]
        responses = [response for _, _, response in ended]
        longest = max((len(prompt) + len(each.tokens) for _, prompt, each in ended), default=1)
        group = RowGroup(
            rows=torch.tensor(rows, dtype=torch.int64) + self._start,
            fields=self._lay_out(rows, prompts, responses, longest),
            width=width,
        )
        self._outlet.put(len(STREAM_SHARES) - 1 - len(self._sizes), group)
