"""A schedule of the learning rate: up to its peak and down again."""


def factor(step: int, total_steps: int) -> float:
    """Return the factor of the peak learning rate in a step; steps count from 1 to total_steps."""
    middle = (total_steps + 1) / 2
    return 1 - abs(step - middle) / middle
