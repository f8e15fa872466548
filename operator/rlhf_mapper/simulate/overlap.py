"""Scoring while the longest responses are generated (`rollout.stream`; RLHFuse, arXiv:2409.13221, section 4)."""

from collections.abc import Sequence

import numpy as np

from rlhf_api.spec.rollout import stream_groups
from rlhf_mapper.simulate.layouts import Numbers
from rlhf_mapper.workload import Lengths, Workload


def left_to_score(generation: float, scoring: float, load: Workload) -> float:
    """Return the seconds of scoring in another pool that are left when generation has ended.

    Responses go to scoring in groups, shortest first. A decode step is assumed as long with few responses as with many.
    So a group ends after (its longest response / the longest of all) of the generation time. Its scoring takes its
    share of all tokens.
    """
    ready = 0.0
    for ends, share in _groups(load.response, load.prompt.mean):
        ready = max(ready, generation * ends) + scoring * share
    return ready - generation


def _groups(response: Lengths, prompt: float) -> list[tuple[float, float]]:
    """Return (end as a share of generation time, share of the tokens) of each group of responses, shortest first."""
    ordered = np.sort(np.array(response.sample))
    total = float((prompt + ordered).sum())
    parts = [ordered[rows.start : rows.stop] for rows in stream_groups(len(ordered)) if rows]
    return [(float(part[-1]) / response.longest, float((prompt + part).sum()) / total) for part in parts]


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
    is_beside = load.streams and not load.works_ahead and stages[0] == 0
    return left_to_score(generation, float(stages[1]), load) if is_beside else float(stages[1])
