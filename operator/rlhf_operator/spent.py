"""Seconds, GPU-seconds and price by job and phase, as far as this operator has observed them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from rlhf_api.status import Phase
from rlhf_operator.snapshot import ObservedJob

ENDED: Final = ("Succeeded", "Failed")
WITH_PODS: Final = ("Provisioning", "Initializing", "Running", "Suspending")
HOUR: Final = 3600.0


@dataclass
class Account:
    """Account of the time and money that one job has spent."""

    job: ObservedJob
    """Job of the account, as observed last."""
    seen: datetime
    """Time of that last observation."""
    seconds: Counter[Phase] = field(default_factory=Counter)
    gpu_seconds: Counter[Phase] = field(default_factory=Counter)
    """GPUs of the mapping times seconds, by phase; phases in which the job waits for pods count too."""
    cost: float | None = None
    """Price of the GPU time in phases with pods; None if the job's GPUs have no price."""

    def add(self, seconds: float) -> None:
        """Add seconds during which the job was in its last observed state."""
        status = self.job.status
        phase, mapping = status.phase, status.mapping
        self.seconds[phase] += seconds  # type: ignore[assignment]  # a Counter of floats
        if mapping is None:
            return
        self.gpu_seconds[phase] += mapping.gpus * seconds  # type: ignore[assignment]
        if mapping.price_per_hour is not None:
            spent = mapping.price_per_hour * seconds / HOUR if phase in WITH_PODS else 0.0
            self.cost = (self.cost or 0.0) + spent


def look(known: Mapping[str, Account], jobs: Iterable[ObservedJob], now: datetime) -> dict[str, Account]:
    """Return the accounts of all jobs that exist, by uid, with the time since the last look added.

    Between two looks a job counts as it was at the first look. known: the accounts after the last look.
    """
    accounts = {}
    for job in jobs:
        account = known.get(job.uid) or Account(job, now)
        if account.job.status.phase not in ENDED:
            account.add(max(0.0, (now - account.seen).total_seconds()))
        account.job, account.seen = job, now
        accounts[job.uid] = account
    return accounts
