"""Kind of job whose errors bound a prediction, and whether two predictions differ by more than their error."""

from collections.abc import Iterable

from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import ErrorKind
from rlhf_mapper.workload import Workload

LAYOUT_ERROR = 0.1
"""Relative error of the ratio of two predictions for one job: the median of 16 pairs of placements that were measured.

They are those of HybridFlow's Figure 12. It is much smaller than the error of one prediction: what is wrong about the
job, such as a kernel's share of the peak, is wrong in both.
"""


def error_kind(models: Iterable[Architecture], load: Workload) -> ErrorKind:
    """Return the kind of job whose errors (`Software.errors`) bound the interval of a prediction.

    A source that the fit has not seen lies inside with a probability of 80 %, by Student's t of the sources' mean
    errors (`benchmarks/fit.py ours --leave-out`). Nobody has counted how many left-out points do.
    """
    if any(model.experts > 1 for model in models):
        return "Experts"
    if not any(work.generated for work in load.work.values()):
        return "Training"
    return "Async" if load.works_ahead else "Sync"


def differ(first: float, second: float) -> bool:
    """Whether two predicted durations of one job differ by more than the error of their ratio (`LAYOUT_ERROR`)."""
    return max(first, second) > (1 + LAYOUT_ERROR) * min(first, second)
