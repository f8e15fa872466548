"""Makes vLLM look at a model's class in this process, and not in one of its own, which imports all of vLLM again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def classes_inspected_here() -> Iterator[None]:
    """While the block runs, vLLM looks in this process; its own one is for programs that fork, which CUDA forbids."""
    from vllm.model_executor.models import registry

    original = registry._run_in_subprocess  # noqa: SLF001 there is no public hook
    registry._run_in_subprocess = lambda look: look()  # noqa: SLF001
    try:
        yield
    finally:
        registry._run_in_subprocess = original  # noqa: SLF001
