"""Patch of vLLM: it inspects a model's class in this process, not in a new one that imports all of vLLM again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def classes_inspected_here() -> Iterator[None]:
    """Make vLLM inspect classes in this process during the block; its separate one is for programs that fork."""
    from vllm.model_executor.models import registry

    original = registry._run_in_subprocess  # noqa: SLF001 there is no public hook
    registry._run_in_subprocess = lambda look: look()  # noqa: SLF001
    try:
        yield
    finally:
        registry._run_in_subprocess = original  # noqa: SLF001
