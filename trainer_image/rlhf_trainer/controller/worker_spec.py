"""Recipe of a worker: its class and the arguments from which every rank of a pool builds it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.types import Marks, transfers_of


@dataclass(frozen=True)
class WorkerSpec:
    """Worker class of a role, and the arguments with which every rank of a group builds it."""

    worker_class: type
    arguments: Mapping[str, Any]
    layout: ParallelSizes | None = None
    """Layout of the model over the group's ranks; None: the layout of the group."""

    @cached_property
    def transfers(self) -> Marks:
        """Transfer declarations of the worker's methods by name: protocol, fields read and fields added."""
        return transfers_of(self.worker_class, self.arguments)

    def code_of(self, method: str) -> Callable[..., object]:
        """Return the function that errors of `method` point to by file and line: by `own_code`, else the method."""
        own = getattr(self.worker_class, "own_code", None)
        found: Callable[..., object] | None = own(method, **self.arguments) if own else None
        return found or getattr(self.worker_class, method)

    def build(self) -> Any:  # any class may be a worker, the user's too
        return self.worker_class(**self.arguments)
