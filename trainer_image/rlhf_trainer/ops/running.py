"""Running mean and standard deviation of numbers, merged batch by batch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RunningMoments:
    """Count, mean and sum of squared deviations from the mean of the numbers seen so far.

    Example: `RunningMoments().merge(2, 5.0, 2.0)` has seen 4.0 and 6.0.
    """

    count: int | float = 0
    mean: float = 0.0
    m2: float = 0.0

    def merge(self, batch_count: int | float, batch_mean: float, batch_m2: float) -> "RunningMoments":
        """Return the moments after a batch of further numbers (Chan, Golub and LeVeque 1979, "Updating formulae").

        The result does not depend on how the numbers were cut into batches, up to rounding.
        """
        count = self.count + batch_count
        if count == 0:
            return self
        delta = batch_mean - self.mean
        return RunningMoments(
            count=count,
            mean=self.mean + delta * batch_count / count,
            m2=self.m2 + batch_m2 + delta**2 * self.count * batch_count / count,
        )

    @property
    def std(self) -> float:
        """Population standard deviation of the numbers seen so far; 1.0 while they are fewer than two."""
        return math.sqrt(self.m2 / self.count) if self.count >= 2 else 1.0
