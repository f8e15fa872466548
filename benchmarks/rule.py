"""The reward of the jobs in `work`, in a file of its own, which imports nothing."""

from __future__ import annotations


def score(prompts: list[str], responses: list[str], finished: list[bool]) -> list[float]:  # noqa: ARG001
    """How many different characters a response has."""
    return [float(len(set(response))) for response in responses]
