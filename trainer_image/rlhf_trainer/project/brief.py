"""A reward for short answers."""


def score(prompts: list[str], responses: list[str], finished: list[bool], *, longest: int) -> list[float]:  # noqa: ARG001
    """1 for a response that ends by itself and is not too long."""
    return [float(done and len(text.split()) <= longest) for text, done in zip(responses, finished, strict=True)]
