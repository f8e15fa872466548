"""A schedule of the learning rate: up to its peak and down again."""


def factor(step: int, total_steps: int) -> float:
    """What the learning rate is multiplied by in a step, from 1 to total_steps."""
    middle = (total_steps + 1) / 2
    return 1 - abs(step - middle) / middle
