"""Work at the same time: scoring beside generation (RLHFuse, arXiv:2409.13221, section 4)."""

import numpy as np

from rlhf_api.spec.rollout import stream_groups
from rlhf_mapper.kernels import Numbers
from rlhf_mapper.workload import Workload


def groups_of(load: Workload) -> tuple[tuple[float, float], ...]:
    """Return (end as a share of generation, share of all scoring that is left then) by group of responses.

    Responses go to scoring in groups, shortest first. A decode step is assumed as long with few responses as with many.
    So a group ends after (its longest response / the longest of all) of the generation time. Its scoring takes its
    share of all tokens. Empty if scoring does not overlap generation.
    """
    if not load.streams or load.works_ahead:
        return ()
    ordered, prompt = np.sort(np.array(load.response.sample)), load.prompt.mean
    total = float((prompt + ordered).sum())
    return tuple(
        (float(ordered[rows.stop - 1]) / load.response.longest, float((prompt + ordered[rows.start :]).sum()) / total)
        for rows in stream_groups(len(ordered))
        if rows
    )


def stages_of(seconds: Numbers, load: Workload, *, generates: bool) -> Numbers:
    """Return a pool's stages [S, ...] for a search (`Objective`); seconds: [4, ...], the transition's are the last."""
    generation, preparation, training, transition = seconds
    if load.works_ahead:
        return np.stack([generation, transition, preparation, training])
    if not groups_of(load):
        return np.stack([generation + transition, preparation, training])
    nothing = np.zeros_like(preparation)
    scored = (preparation, nothing) if generates else (nothing, preparation)
    return np.stack([generation + transition, *scored, training])
