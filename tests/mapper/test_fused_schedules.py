"""The schedule of two fused updates: each pass after its input, little memory, near a lower bound, never slower."""

from collections.abc import Sequence
from itertools import pairwise, product

import pytest

from rlhf_mapper.auto_map import auto_map
from rlhf_mapper.fused_schedule import PipelineUpdate, Schedule, fused_schedule
from rlhf_mapper.mapping import DeviceMapping
from rlhf_planning.timeline import schedule_lines
from tests.mapper.planned_jobs import cluster_of, job_of, shapes_of


def pair(first: int, second: int, *, share: float = 1.0, reverses: bool = True) -> tuple[PipelineUpdate, ...]:
    """An actor and a critic of `share` of its seconds, with so many micro-batches."""
    critic = PipelineUpdate(micro_batches=second, forward=share, backward=2 * share, reverses=reverses)
    return PipelineUpdate(micro_batches=first), critic


def least_seconds(stages: int, updates: Sequence[PipelineUpdate]) -> float:
    """Return a lower bound of any schedule's seconds.

    A rank computes all passes through its stages; before the first one and after the last one, a micro-batch passes
    the stages before them. A model's micro-batches pass each stage one after the other.
    """
    busy = sum(each.micro_batches * (each.forward + each.backward) for each in updates)
    waits = [
        min(each.stage(rank, stages) * each.forward for each in updates)
        + min(each.stage(rank, stages) * each.backward for each in updates)
        for rank in range(stages)
    ]
    return max(busy + max(waits), *(one_after_the_other(stages, [each]) for each in updates))


def one_after_the_other(stages: int, updates: Sequence[PipelineUpdate]) -> float:
    """Return the seconds of the updates without fusion, each by 1F1B."""
    return sum((each.micro_batches + stages - 1) * (each.forward + each.backward) for each in updates)


def test_four_micro_batches_on_two_stages_leave_no_bubble() -> None:
    """A forward pass takes a second, a backward pass two: 5 x 3 s for each model alone, and 8 x 3 s of work a rank."""
    updates = pair(4, 4)
    schedule = fused_schedule(2, updates)
    assert (schedule.seconds, one_after_the_other(2, updates)) == (24, 30)
    assert fused_schedule(2, pair(4, 4, reverses=False)).seconds == 27, "the last rank waits for the first one"
    first = [(each.model, each.is_backward, each.micro_batch) for each in schedule.ranks[0][:5]]
    assert first == [(0, False, 0), (0, False, 1), (1, False, 0), (1, True, 0), (0, True, 0)]
    shares = [(pair(4, 4, share=share), 5 * 3 * (1 + share)) for share in (0.5, 0.7, 0.9)]
    assert all(fused_schedule(2, each).seconds <= 0.85 * alone for each, alone in shares), "whatever the seconds"


def require_possible(schedule: Schedule, stages: int, updates: tuple[PipelineUpdate, ...]) -> None:
    """Each pass once, after those that it needs and those of its rank; no more micro-batches in flight than in 1F1B."""
    ends = {
        (each.model, each.is_backward, each.micro_batch, updates[each.model].stage(rank, stages)): each.end
        for rank, passes in enumerate(schedule.ranks)
        for each in passes
    }
    assert len(ends) == sum(map(len, schedule.ranks)) == 2 * stages * sum(each.micro_batches for each in updates)
    for rank, passes in enumerate(schedule.ranks):
        held = [0] * len(updates)
        assert all(one.end <= other.start for one, other in pairwise(passes))
        for each in passes:
            stage = updates[each.model].stage(rank, stages)
            neighbour = stage + 1 if each.is_backward else stage - 1
            assert ends.get((each.model, each.is_backward, each.micro_batch, neighbour), 0.0) <= each.start
            held[each.model] += -1 if each.is_backward else 1
            assert held[each.model] <= stages - stage


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_any_two_updates_are_faster_than_one_after_the_other(stages: int) -> None:
    worst = 0.0
    for first, second, share, reverses in product((1, 3, 8), (1, 4, 8), (0.25, 1.0), (False, True)):
        updates = pair(first, second, share=share, reverses=reverses)
        schedule = fused_schedule(stages, updates)
        require_possible(schedule, stages, updates)
        assert schedule.seconds < one_after_the_other(stages, updates)
        worst = max(worst, schedule.seconds / least_seconds(stages, updates))
    assert 1 <= worst < 1.6


def planned(fuse: str, **training: int) -> DeviceMapping:
    """The plan of PPO with actor and critic of 7B on two stages, on H100 in nodes of eight."""
    stages = {"parallelism": {"pipeline": 2}}
    pool = {"name": "all", "models": ["actor", "critic", "reference", "reward"], "slotsPerNode": 8}
    job = job_of(
        "PPO",
        {"actor": stages, "critic": stages},
        training={"miniBatchSize": 32, "microBatchTokens": 2048, **training, "fuseUpdates": fuse},
        data={"maxPromptTokens": 256, "maxResponseTokens": 256},
        placement={"mode": "Manual", "pools": [pool]},
    )
    found = auto_map(job, cluster_of(("h100-80g", 1, 8)), shapes_of(job), device="GPU")
    assert isinstance(found, DeviceMapping)
    return found


def test_a_plan_has_the_fused_update_its_memory_and_a_picture() -> None:
    fused, alone = (planned(each).prediction for each in ("Auto", "Never"))
    assert fused
    assert alone
    assert fused.fused_updates
    updates, saved = fused.fused_updates, 2 * (fused.fused_updates.alone.seconds - fused.fused_updates.schedule.seconds)
    assert alone.phases["update"] - fused.phases["update"] == pytest.approx(saved)
    assert alone.step_seconds - fused.step_seconds == pytest.approx(saved)
    held = [sum(each.peak(("actor", "critic"), "training").values()) for each in (fused, alone)]
    assert held[0] > held[1], "activations of both models at once"
    both = (updates.actor, updates.critic)
    assert updates.alone.seconds == pytest.approx(one_after_the_other(updates.stages, both))
    lines = list(schedule_lines(updates, columns=80))
    assert lines[2].strip().startswith("rank 1  ··"), "the second stage waits for the first"
    assert lines[5].strip().startswith("rank 1  CC"), "but not if it holds the first stage of the critic"


def test_steps_of_one_update_are_not_fused() -> None:
    one_update = planned("Auto", miniBatchSize=64)
    assert (one_update.prediction and one_update.prediction.fused_updates) is None
