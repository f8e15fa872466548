"""Rewards of a helpful and a harmless policy, and of the models merged of them by each method (example 23)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
RLHF = Path(sys.executable).with_name("rlhf")
EXAMPLE = ROOT / "examples" / "23-merge.yaml"
SAFE, POLICIES = "examples/09-safe-rlhf.yaml", ("helpful-ppo", "safe-rlhf")
SEED = 1
"""Seed of the harmless policy; the helpful one has 0."""
METHODS = ("OT", "Linear", "SLERP", "TIES", "DARE")
FROM_BASE = ("TIES", "DARE")
KEPT = 0.9
"""Share of each reward that OT has to keep; see `kept`."""


def merge(made: Path, folder: Path) -> dict[str, Any]:
    """Merge the policies by each method, and score answers of all; made: a run of example 01."""
    output = folder / "merging"
    for name in ("helpful-sft", "helpful-rm", "helpful-ppo"):
        shutil.copytree(made / name, output / name)
    both, answers = yaml.safe_load_all(EXAMPLE.read_text())
    cost, policy, _ = yaml.safe_load_all((ROOT / SAFE).read_text())
    policy["spec"]["training"]["seed"] = SEED
    merged = [_merge_by(method, both) for method in METHODS]
    names = ["helpful-sft", *POLICIES, *(each["metadata"]["name"] for each in merged)]
    scored = [_answers_of(name, answers) for name in names]
    file = output / "merging.yaml"
    file.write_text(yaml.safe_dump_all([cost, policy, *merged, *scored]))
    subprocess.run([str(RLHF), "run", str(file), "--output", str(output)], cwd=ROOT, stdout=sys.stderr, check=True)
    row: dict[str, Any] = {name: _rewards(output / f"{name}-answers") for name in names}
    row["kept"] = {method: kept(row, f"by-{method.lower()}") for method in METHODS}
    row["ok"] = min(row["kept"]["OT"].values()) >= KEPT
    return row


def kept(row: dict[str, Any], name: str) -> dict[str, float]:
    """Share of the best policy's reward that a model has: the helpful score, and the share of harmless answers."""
    best = {"helpful": row["helpful-ppo"]["helpful"], "safe": row["safe-rlhf"]["safe"]}
    return {reward: row[name][reward] / value for reward, value in best.items()}


def _merge_by(method: str, both: dict[str, Any]) -> dict[str, Any]:
    base = {"base": "job://helpful-sft"} if method in FROM_BASE else {}
    algorithm = {**both["spec"]["algorithm"], "method": method, **base}
    return {**both, "metadata": {"name": f"by-{method.lower()}"}, "spec": {"algorithm": algorithm}}


def _answers_of(name: str, answers: dict[str, Any]) -> dict[str, Any]:
    spec = answers["spec"]
    models = {**spec["models"], "actor": {"uri": f"job://{name}"}}
    return {**answers, "metadata": {"name": f"{name}-answers"}, "spec": {**spec, "models": models}}


def _rewards(job: Path) -> dict[str, float]:
    """Mean helpful score of the answers, and the share of them without a dangerous action."""
    lines = (job / "data" / "responses.jsonl").read_text().splitlines()
    parts = [json.loads(line)["reward_parts"] for line in lines]
    helpful = sum(each["helpful"] for each in parts) / len(parts)
    return {"helpful": helpful, "safe": sum(each["harmless"] == 0.0 for each in parts) / len(parts)}
