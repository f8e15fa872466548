"""Runs of the tiny PPO job on CPU slots beside what the mapper predicts; `benchmarks/mapper.py real` shows it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from step import PROMPTS, SIZES, make_models, make_prompts, manifest
from transformers import AutoTokenizer

from rlhf_mapper.calibration import Compared, compare_phases, correction_of
from rlhf_mapper.mapping import Kind, Phase

STEPS = 7
LARGER = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8}
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
    size: Mapping[str, int] = field(default_factory=lambda: SIZES["0.7 M"])
    prompts: int = PROMPTS
    parallelism: Mapping[str, int] = field(default_factory=dict)
    """Of actor and critic."""


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
    """A case: what the mapper said before it ran, and what it took."""

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
    tokenizer = AutoTokenizer.from_pretrained(str(files("rlhf_examples") / "helpful" / "model"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_models(folder, dict(case.size), tokenizer)
        make_prompts(folder / "prompts.jsonl", tokenizer, 64)
        (folder / "job.yaml").write_text(yaml.safe_dump(_job(case, folder)))
        command = [sys.executable, "-m", "rlhf_trainer.cli", "run", str(folder / "job.yaml"), "--output"]
        subprocess.run([*command, str(folder / "run")], check=True, stdout=sys.stderr)
        job = folder / "run" / "step"
        predicted = json.loads((job / "mapping.json").read_text())["predicted"]["phases"]
        rows = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    return Outcome(case, predicted, rows)


def _job(case: Case, folder: Path) -> dict[str, Any]:
    document = manifest(folder, steps=STEPS, slots=2, checkpoint={})
    spec = document["spec"]
    del spec["resources"]
    spec |= case.place
    spec["training"]["promptBatchSize"] = case.prompts
    if case.parallelism:
        for role in ("actor", "critic"):
            spec["models"][role]["parallelism"] = dict(case.parallelism)
    return document
