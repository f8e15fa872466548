"""Runs of the tiny PPO job on CPU slots beside what the mapper predicts; `benchmarks/mapper.py real` shows it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from work import SIZES, changed, make_inputs, manifest, run

from rlhf_mapper.calibration import Compared, compare_phases, correction_of
from rlhf_mapper.mapping import Kind, Phase

STEPS, PROMPTS, SAMPLES = 7, 16, 4
LARGER = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TOGETHER: Mapping[str, Any] = {"resources": {"slotsPerNode": 2}}
APART = {
    "placement": {
        "mode": "Manual",
        "pools": [
            {"name": "left", "models": ["actor", "reference"], "slotsPerNode": 1},
            {"name": "right", "models": ["critic", "reward"], "slotsPerNode": 1},
        ],
    }
}


@dataclass(frozen=True)
class Case:
    """One way to run the job."""

    name: str
    place: Mapping[str, Any]
    """Fields of the spec that say where the models live."""
    size: Mapping[str, int] = field(default_factory=lambda: SIZES["0.7M"])
    prompts: int = PROMPTS
    parallelism: Mapping[str, int] = field(default_factory=dict)
    """Parallel sizes of actor and critic."""


CASES = (
    Case("together on 2 slots (calibrated on)", TOGETHER),
    Case("together on 1 slot", {"resources": {"slotsPerNode": 1}}),
    Case("actor+reference | critic+reward", APART),
    Case("twice the prompts", TOGETHER, prompts=2 * PROMPTS),
    Case("half the prompts", TOGETHER, prompts=PROMPTS // 2),
    Case("tensor 2", TOGETHER, parallelism={"tensor": 2}),
    Case("5 M parameters", TOGETHER, size=LARGER),
)


@dataclass(frozen=True)
class Outcome:
    """Result of a case: predicted seconds by phase, and the measured steps."""

    case: Case
    predicted: Mapping[Phase, float]
    rows: Sequence[Mapping[str, float]]

    def compared(self, factors: Mapping[Kind, float], kinds: Mapping[Phase, Kind]) -> list[Compared[Phase]]:
        """Corrected prediction and measurement by phase."""
        corrected = {phase: seconds * factors.get(kinds[phase], 1.0) for phase, seconds in self.predicted.items()}
        return compare_phases(corrected, self.rows)


def outcomes() -> list[Outcome]:
    """Every case, run for STEPS steps."""
    return [_run(case) for case in CASES]


def factors_of(outcome: Outcome) -> Mapping[Kind, float]:
    """The correction by which an outcome would have been predicted as it was."""
    return correction_of(outcome.predicted, outcome.rows).factors


def _run(case: Case) -> Outcome:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_inputs(folder, case.size)
        done = run([_job(case, folder)], folder) / "step"
        predicted = json.loads((done / "mapping.json").read_text())["predicted"]["phases"]
        rows = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    return Outcome(case, predicted, rows)


def _job(case: Case, folder: Path) -> dict[str, Any]:
    job = changed(
        manifest(folder, "PPO", steps=STEPS),
        {
            "models": {"reward": {"uri": f"file://{folder}/scorer"}},
            "rollout": {"samplesPerPrompt": SAMPLES},
            "training": {"promptBatchSize": case.prompts, "miniBatchSize": 32},
            **case.place,
        },
    )
    if case.parallelism:
        for role in ("actor", "critic"):
            job["spec"]["models"][role]["parallelism"] = dict(case.parallelism)
    return job
