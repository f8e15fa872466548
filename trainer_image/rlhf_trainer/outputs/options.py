"""The outputs that a user asks for by option, opened in one place; one that is not asked for is not even imported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlhf_trainer.outputs.listener import Listener


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What `rlhf run` shows beside the terminal and the run folder."""

    tensorboard: bool = False
    """Event files under DIR/tensorboard/<job>."""
    trace: bool = False
    """DIR/<job>/trace.json."""
    metrics_port: int | None = None
    """Port of an HTTP server for Prometheus."""


@contextmanager
def opened(options: OutputOptions, output: Path) -> Iterator[Sequence[Listener]]:
    """The listeners of a run into the folder `output`; what they hold open ends with the block.

    Raises EnvironmentProblem when the port cannot be had.
    """
    listeners: list[Listener] = []
    with ExitStack() as stack:
        if options.metrics_port is not None:
            from rlhf_trainer.outputs.prometheus import metrics_served

            listeners.append(stack.enter_context(metrics_served(options.metrics_port)))
        if options.tensorboard:
            from rlhf_trainer.outputs.event_files import EventFiles

            listeners.append(EventFiles(output / "tensorboard"))
        if options.trace:
            from rlhf_trainer.outputs.trace import Trace

            listeners.append(Trace(output))
        yield listeners
