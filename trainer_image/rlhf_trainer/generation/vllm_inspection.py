"""Makes vLLM look at a model's class in this process, and not in one of its own, which imports all of vLLM again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def classes_inspected_here() -> Iterator[None]:
    """While this block runs; vLLM's own process keeps CUDA out of one that forks engines, and ours forks none."""
    from vllm.model_executor.models import registry

    def here(look: Callable[[], T]) -> T:
        return look()

    original = registry._run_in_subprocess  # noqa: SLF001 there is no public hook
    registry._run_in_subprocess = here  # noqa: SLF001
    try:
        yield
    finally:
        registry._run_in_subprocess = original  # noqa: SLF001
