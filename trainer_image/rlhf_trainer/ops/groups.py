"""What a response is worth beside the other responses to its prompt.

`returns` and `scores` are those of whole groups: the `group_size` responses to a prompt lie side by side.
"""

from jaxtyping import Bool, Float
from torch import Tensor

GROUP_EPS = 1e-6
"""Added to a group's standard deviation before dividing by it."""
SIGNAL = 1e-6
"""Responses whose scores differ by less teach nothing."""


def group_advantages(returns: Float[Tensor, " B"], *, group_size: int, by_std: bool) -> Float[Tensor, " B"]:
    """Group-relative advantages (GRPO, arXiv:2402.03300, section 4.1.2).

    (R_i - mean(R_1 .. R_G)) / (std(R_1 .. R_G) + 1e-6), the deviation with G - 1 in its denominator; without `by_std`
    only the mean is subtracted (Dr. GRPO, arXiv:2503.20783).
    """
    groups = returns.reshape(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + GROUP_EPS) if by_std else centred).flatten()


def leave_one_out(returns: Float[Tensor, " B"], *, group_size: int) -> Float[Tensor, " B"]:
    """R_i minus the mean of the other returns of its group (RLOO, arXiv:2402.14740)."""
    groups = returns.reshape(-1, group_size)
    others = (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)
    return (groups - others).flatten()


def has_signal(scores: Float[Tensor, " B"], *, group_size: int) -> Bool[Tensor, " B"]:
    """Whether the scores of a row's group differ (DAPO, arXiv:2503.14476, eq. 11); not so where one is NaN."""
    groups = scores.reshape(-1, group_size)
    differ = groups.amax(dim=1) - groups.amin(dim=1) > SIGNAL
    return differ.repeat_interleave(group_size)


def first_groups(chosen: Bool[Tensor, " B"], *, group_size: int, most: int) -> Bool[Tensor, " B"]:
    """The chosen rows of the first `most` chosen groups; the rows of a group are all chosen or none is."""
    groups = chosen.reshape(-1, group_size)[:, 0]
    return (groups & (groups.cumsum(0) <= most)).repeat_interleave(group_size)
