"""Intervals of predicted seconds, by the kind of job, and whether two predictions differ by more than their error."""

from collections.abc import Iterable

from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import ErrorKind, Software
from rlhf_mapper.workload import Workload

LAYOUT_ERROR = 0.1
"""Relative error of the ratio of two predictions for one job: the median of 16 pairs of placements that were measured.

They are those of HybridFlow's Figure 12. It is much smaller than the error of one prediction: what is wrong about the
job, such as a kernel's share of the peak, is wrong in both.
"""


def error_kind(models: Iterable[Architecture], load: Workload) -> ErrorKind:
    """Return the kind of job whose errors the interval of a prediction is taken from."""
    if any(model.experts > 1 for model in models):
        return "Experts"
    if not any(work.generated for work in load.work.values()):
        return "Training"
    return "Async" if load.works_ahead else "Sync"


def interval_of(seconds: float, software: Software, kind: ErrorKind) -> tuple[float, float]:
    """Return (low, high) around predicted seconds.

    A source that the fit has not seen lies inside with a probability of 80 %, by Student's t of the sources' mean
    errors (`benchmarks/fit.py ours --leave-out`). Nobody has counted how many left-out points do.
    """
    low, high = software.errors[kind]
    return seconds * low, seconds * high


def differ(first: float, second: float) -> bool:
    """Whether two predicted durations of one job differ by more than the error of their ratio (`LAYOUT_ERROR`)."""
    return max(first, second) > (1 + LAYOUT_ERROR) * min(first, second)
