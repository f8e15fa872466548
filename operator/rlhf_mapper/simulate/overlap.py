"""Scoring while the longest responses are generated (`rollout.stream`; RLHFuse, arXiv:2409.13221, section 4)."""

from collections.abc import Sequence

import numpy as np

from rlhf_api.spec.rollout import stream_groups
from rlhf_mapper.simulate.layouts import Numbers
from rlhf_mapper.workload import Workload


def left_to_score(generation: float, scoring: float, load: Workload) -> float:
    """Return the seconds of scoring in another pool that are left when generation has ended.

    Responses go to scoring in groups, shortest first. A decode step is assumed as long with few responses as with many.
    So a group ends after (its longest response / the longest of all) of the generation time. Its scoring takes its
    share of all tokens.
    """
    return max(generation * ends + scoring * rest for ends, rest in groups_of(load)) - generation


def groups_of(load: Workload) -> tuple[tuple[float, float], ...]:
    """Return (end as a share of generation, share of all scoring that is left then) by group, shortest first."""
    ordered, prompt = np.sort(np.array(load.response.sample)), load.prompt.mean
    total = float((prompt + ordered).sum())
    starts = [rows.start for rows in stream_groups(len(ordered)) if rows]
    ends = [rows.stop for rows in stream_groups(len(ordered)) if rows]
    return tuple(
        (float(ordered[end - 1]) / load.response.longest, float((prompt + ordered[start:]).sum()) / total)
        for start, end in zip(starts, ends, strict=True)
    )


def step_of(pools: Sequence[Numbers], load: Workload) -> tuple[float, tuple[float, float, float]]:
    """Return the seconds of a step, and of its stages, each as long as in the slowest pool; pools: stage seconds [3].

    With `works_ahead`, responses of a later step are generated during the two other stages. With `streams`, the second
    stage is only the scoring that is left when generation has ended.
    """
    first = max(float(each[0]) for each in pools)
    second = max(_second(first, each, load) for each in pools)
    third = max(float(each[2]) for each in pools)
    return max(first, second + third) if load.works_ahead else first + second + third, (first, second, third)


def _second(generation: float, stages: Numbers, load: Workload) -> float:
    """Return the seconds of a pool's preparation (scoring); streaming shortens it in pools that do not generate."""
    is_beside = load.scores_early and stages[0] == 0
    return left_to_score(generation, float(stages[1]), load) if is_beside else float(stages[1])
