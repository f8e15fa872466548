"""A reward for short answers."""


def score(prompts: list[str], responses: list[str], finished: list[bool], *, longest: int) -> list[float]:
    """1 for a response that ends by itself and is not too long, else 0."""
    assert len(prompts) == len(responses)
    short = [len(response.split()) <= longest for response in responses]
    return [float(ended and brief) for ended, brief in zip(finished, short, strict=True)]
