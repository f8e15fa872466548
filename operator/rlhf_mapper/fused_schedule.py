"""One schedule for the updates of several models on one pipeline (RLHFuse, arXiv:2409.13221, section 5).

While a rank would wait for one model, it computes micro-batches of another.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add


@dataclass(frozen=True, kw_only=True)
class PipelineUpdate:
    """Forward and backward passes of one model's update through all stages of a pipeline."""

    micro_batches: int
    forward: float = 1.0
    """Seconds of a micro-batch's forward pass through one stage."""
    backward: float = 2.0
    reverses: bool = False
    """Whether the last rank holds the first stage."""

    def stage(self, rank: int, stages: int) -> int:
        return stages - 1 - rank if self.reverses else rank


@dataclass(frozen=True)
class Pass:
    """Forward or backward pass of a micro-batch through the stage of one rank, and its seconds in the schedule."""

    model: int
    is_backward: bool
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """Passes of each rank of a pipeline, in order."""

    ranks: tuple[tuple[Pass, ...], ...]

    @property
    def seconds(self) -> float:
        return max(passes[-1].end for passes in self.ranks)


@lru_cache
def fused_schedule(stages: int, updates: tuple[PipelineUpdate, ...]) -> Schedule:
    """Return the faster of two schedules in which a free rank begins the pass that can begin first.

    If several passes can begin at once, one schedule prefers early stages, and the other late stages. The first hardly
    depends on the models' seconds. Stage s of p holds at most p - s micro-batches of each model, as in 1F1B.
    """
    return min((_greedy(stages, updates, sign=each) for each in (1, -1)), key=lambda schedule: schedule.seconds)


def _greedy(stages: int, updates: tuple[PipelineUpdate, ...], *, sign: int) -> Schedule:
    ends: dict[tuple[int, bool, int, int], float] = {}
    ranks: list[list[Pass]] = [[] for _ in range(stages)]
    done: defaultdict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for _ in range(2 * stages * sum(each.micro_batches for each in updates)):
        free = [passes[-1].end if passes else 0.0 for passes in ranks]
        start, _, is_forward, model, rank = min(
            (max(ready, free[rank]), sign * updates[model].stage(rank, stages), not is_backward, model, rank)
            for rank in range(stages)
            for model, is_backward, ready in _ready(rank, stages, updates, done, ends)
        )
        update, is_backward = updates[model], not is_forward
        micro_batch = done[model, rank][is_backward]
        end = start + (update.backward if is_backward else update.forward)
        ends[model, is_backward, micro_batch, update.stage(rank, stages)] = end
        ranks[rank].append(Pass(model, is_backward, micro_batch, start, end))
        done[model, rank][is_backward] += 1
    return Schedule(tuple(map(tuple, ranks)))


def _ready(
    rank: int,
    stages: int,
    updates: Sequence[PipelineUpdate],
    done: dict[tuple[int, int], list[int]],
    ends: dict[tuple[int, bool, int, int], float],
) -> Iterator[tuple[int, bool, float]]:
    """Yield (model, whether backward, second at which its input is there) of the next passes of a rank."""
    for model, update in enumerate(updates):
        stage, (forwards, backwards) = update.stage(rank, stages), done[model, rank]
        if forwards < update.micro_batches and forwards - backwards < stages - stage:
            ready = ends.get((model, False, forwards, stage - 1)) if stage else 0.0
            if ready is not None:
                yield model, False, ready
        if backwards < forwards:
            before = (model, True, backwards, stage + 1) if stage + 1 < stages else (model, False, backwards, stage)
            if before in ends:
                yield model, True, ends[before]


@dataclass(frozen=True)
class FusedUpdates:
    """One optimizer step of actor and critic, whose passes are one schedule."""

    stages: int
    actor: PipelineUpdate
    critic: PipelineUpdate

    @property
    def schedule(self) -> Schedule:
        return fused_schedule(self.stages, (self.actor, self.critic))

    @property
    def alone(self) -> Schedule:
        """Schedule of both updates one after the other, each by 1F1B."""
        first = fused_schedule(self.stages, (self.actor,))
        second, after = fused_schedule(self.stages, (replace(self.critic, reverses=False),)), first.seconds
        later = (
            tuple(replace(each, model=1, start=each.start + after, end=each.end + after) for each in passes)
            for passes in second.ranks
        )
        return Schedule(tuple(map(add, first.ranks, later)))
