"""Output, display, listeners and stop signals that the jobs of a run share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_trainer.outputs.display import Display
from rlhf_trainer.outputs.listeners import Listener
from rlhf_trainer.run.stopping import StopSignals


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Run folder, outputs and stop signals of a run."""

    output: Path
    display: Display
    listeners: Sequence[Listener]
    stop: StopSignals
