"""Names of the measures of an evaluation; a step's record has them as `evaluation/<name>`."""


def measure_of(name: str, measure: str) -> str:
    """Return the full name of a measure over the data set `name`, or over all rows for the empty name."""
    return f"{name}/{measure}" if name else measure


def pass_sizes(samples: int) -> list[int]:
    """Return the k for which pass@k is measured: 2, 4, ... up to `samples`, and `samples` itself."""
    return sorted({*(2**power for power in range(1, samples.bit_length())), samples} - {1})
