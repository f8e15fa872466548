"""Two steps of every example's job, with tiny models and without vLLM."""

from __future__ import annotations

import math
from typing import Any, get_args

from rlhf_api.names import Role
from rlhf_trainer.telemetry import merge
from tests.gpu.rung import Rung, main
from tests.trainer.tiny import save_tiny
from tests.trainer.training.test_every_algorithm_takes_a_step import JOBS, steps


def measure(rung: Rung) -> None:
    """Each job is a part."""
    for path, name in JOBS:
        with rung.part(name) as found:
            found.update(_last_step(rung, path, name))


def _last_step(rung: Rung, path: Any, name: str) -> dict[str, float]:
    """The losses and gradient norms of an example's second step."""
    language = save_tiny(rung.folder / "language", seed=3)
    scorer = save_tiny(rung.folder / "scorer", seed=4, labels=1)
    folders = {role: language if role in ("actor", "reference", "teacher") else scorer for role in get_args(Role)}
    reports, _ = steps(path, name, folders)
    record = merge(reports[-1:])
    norms = {key: value for key, value in record.items() if key.startswith("grad_norm/")}
    assert norms, f"no gradient norm among {sorted(record)}"
    assert all(math.isfinite(norm) and norm > 0 for norm in norms.values()), norms
    assert record["skipped_updates"] == 0
    return {**norms, **{key: value for key, value in record.items() if key.startswith("loss/")}}


if __name__ == "__main__":
    main(measure)
