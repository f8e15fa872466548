"""An environment package in the format of `verifiers` 0.4: sums of two digits, with a reward of its own."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class SumData(vf.TaskData):  # type: ignore[misc]
    """A question with its answer, which the model is not shown."""

    answer: str


class Sum(vf.Task[SumData, vf.State]):  # type: ignore[misc]
    """A sum."""

    @vf.reward(weight=0.5)  # type: ignore[untyped-decorator]
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Config(vf.TasksetConfig):  # type: ignore[misc]
    """What a manifest may change."""

    largest: int = 9


class Sums(vf.Taskset[Sum, Config]):  # type: ignore[misc]
    """All sums of two numbers up to the largest."""

    def load(self) -> Iterator[Sum]:
        numbers = range(self.config.largest + 1)
        for one, other in ((one, other) for one in numbers for other in numbers):
            data = SumData(prompt=f"{one}+{other}", system_prompt="Add.", answer=str(one + other))
            yield Sum(data, self.config.task)


__all__ = ["Sums"]
