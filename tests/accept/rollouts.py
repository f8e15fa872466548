"""What a rollout pool is held to: convergence and speed with stale responses, and the bytes of changed weights."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_trainer.hybrid_engine.weight_store import WeightReader

ROOT = Path(__file__).resolve().parents[2]
RLHF = Path(sys.executable).with_name("rlhf")
PPO, GRPO = "helpful-ppo", "arithmetic-grpo"
EXAMPLES = {PPO: "examples/01-helpful-ppo.yaml", GRPO: "examples/12-arithmetic-grpo.yaml"}
MADE = {PPO: ("run", ("helpful-sft", "helpful-rm")), GRPO: ("verifiable_rewards", ("arithmetic-sft",))}
"""The row whose run has made the models that a job begins with, and the jobs that made them."""
MODELS = {PPO: "actor, critic, reference, reward", GRPO: "actor"}
MEASURES = {PPO: "win_rate", GRPO: "reward_after"}
STALENESS, SKIPPED = (1, 2), 3
"""Steps at the start, and the last, in which nothing is generated ahead: they count in no time."""
GOING_ON = ("rollout.maxStaleness=2", "rollout.partial=Continue", "rollout.pipelineParallel=2")
"""Changes of PPO, with which responses are written more slowly than learned from, and so meet new weights."""
LONG = (
    "data.maxResponseTokens=64",
    "rollout.minResponseTokens=64",
    "rollout.samplesPerPrompt=6",
    "training.miniBatchSize=64",
    "training.updateEpochs=2",
    "training.totalSteps=12",
    "evaluation=null",
)
"""Changes of GRPO, which trains one model, with which generation takes half of a step."""
SMALL = (
    "training.precision=BF16",
    "models.actor.optimizer.learningRate=1e-6",
    "training.totalSteps=6",
    "evaluation=null",
)
WITHIN, FASTER, SHARE = 0.03, 1.25, 0.15
STREAMED, FORESEEN, ROUNDING = 0.85, 0.1, 1e-5


def streaming(folder: Path) -> dict[str, Any]:
    """PPO on two pools with responses of skewed lengths, off and on: seconds of a step, and what was predicted."""
    found = folder / "streaming.json"
    command = [sys.executable, "benchmarks/features.py", "streaming", "--json", str(found)]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
    row: dict[str, Any] = json.loads(found.read_text())
    is_foreseen = abs(row["on / off"] - row["predicted on / off"]) <= FORESEEN
    row["ok"] = row["on / off"] <= STREAMED and is_foreseen and row["largest relative difference of a loss"] <= ROUNDING
    return row


def staleness(folder: Path) -> dict[str, Any]:
    """Examples 01 and 12 with responses that are 0, 1 and 2 updates old, and that go on over updates; and the speed.

    The speed is that with longer responses.
    Those of 0 are the runs of the rows that make the models; a rollout pool gives the same losses.
    """
    row: dict[str, Any] = {}
    for job, measure in MEASURES.items():
        found = {"0": measured(folder / MADE[job][0], job, measure)}
        for most in STALENESS:
            output = _run(folder, job, f"{job}-{most}", (f"rollout.maxStaleness={most}",))
            found[str(most)] = measured(output, job, measure)
            assert max(record["staleness"] for record in steps_of(output, job)) == most
        if job == PPO:
            output = _run(folder, job, f"{job}-going-on", GOING_ON, slots=2)
            found["2, Continue"] = measured(output, job, measure)
            row["responses that met new weights"] = sum(each["rollout_interrupted"] for each in steps_of(output, job))
        row[f"{job} {measure}"] = found
        row[f"{job} lost"] = found["0"] - min(found.values())
    seconds = {}
    for most in (0, 1):
        records = steps_of(_run(folder, GRPO, f"long-{most}", (*LONG, f"rollout.maxStaleness={most}")), GRPO)
        records = records[SKIPPED:-1]
        seconds[most] = statistics.median(record["time/step"] for record in records)
        for name in ("rollout_idle", "trainer_idle"):
            row[f"{name} at {most}"] = statistics.median(record[name] for record in records)
        if most == 0:
            shares = [record["time/generation"] / record["time/step"] for record in records]
            row["generation's share of a step"] = statistics.median(shares)
    faster = row["steps per second, 1 to 0"] = seconds[0] / seconds[1]
    row["ok"] = all(row[f"{job} lost"] <= WITHIN for job in MEASURES) and faster >= FASTER
    row["ok"] &= row["responses that met new weights"] > 0
    return row


def delta(folder: Path) -> dict[str, Any]:
    """PPO in bfloat16 at a learning rate of 1e-6, all weights and changed ones: bytes, and the same losses."""
    found = {}
    for sync in ("Full", "Delta"):
        output = _run(folder, PPO, f"sync-{sync}", (*SMALL, f"rollout.weightSync={sync}"))
        found[sync] = steps_of(output, PPO)[1:]  # the first one sends everything
    sent = {sync: [record["bytes/reshard"] for record in records] for sync, records in found.items()}
    losses = [[record["loss/policy"] for record in records] for records in found.values()]
    share, is_same = max(sent["Delta"]) / max(sent["Full"]), losses[0] == losses[1]
    return {"bytes": sent, "share": share, "same losses": is_same, "ok": share <= SHARE and is_same}


def weight_store(folder: Path) -> dict[str, Any]:
    """PPO in bfloat16 at a learning rate of 1e-6, all weights and an adapter: bytes of a version in a weight store.

    The models that it begins with are trained for a few steps only. A reader that joins late has the last version.
    """
    row: dict[str, Any] = {}
    short = [f"--set={job}:training.totalSteps=10" for job in MADE[PPO][1]]
    for kind, changes in {"all weights": (), "adapter": ("models.actor.lora={rank: 8}",)}.items():
        store, output = f"file://{folder}/weights-{kind.split()[0]}", folder / f"store-{kind.split()[0]}"
        own = [f"--set={PPO}:{change}" for change in (*SMALL, f"rollout.weightStore={store}", *changes)]
        command = [str(RLHF), "run", EXAMPLES[PPO], "--output", str(output), *short, *own]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
        records, reader = steps_of(output, PPO)[:-1], WeightReader(store)  # the last one is of two versions
        assert reader.update() == ""
        sizes = {
            each: [record.get(f"weight_store_bytes/{each}", 0.0) for record in records] for each in ("full", "delta")
        }
        missed = sum(record["weight_store_missed"] for record in records)
        row[kind] = {**sizes, "missed": missed, "version read": reader.held}
    full, delta = (row["all weights"][each] for each in ("full", "delta"))
    row["delta / full"] = max(delta) / max(full)
    row["adapter / full"] = max(row["adapter"]["full"]) / max(full)
    row["ok"] = row["delta / full"] <= SHARE and row["adapter / full"] < 1
    return row


def _run(folder: Path, job: str, name: str, changes: Sequence[str], *, slots: int = 1) -> Path:
    """Run the last job of an example with a rollout pool of so many slots, on the models that another row has made."""
    train = f"{{name: train, models: [{MODELS[job]}], slotsPerNode: 1}}"
    pools = f"[{train}, {{name: rollout, models: [rollout], slotsPerNode: {slots}}}]"
    return run_last(folder, job, name, (f"placement={{mode: Manual, pools: {pools}}}", *changes))


def run_last(folder: Path, job: str, name: str, changes: Sequence[str]) -> Path:
    """Run the last job of an example with changes, on the models that another row has made."""
    row, models = MADE[job]
    output = folder / name
    for each in models:
        shutil.copytree(folder / row / each, output / each)
    command = [str(RLHF), "run", EXAMPLES[job], "--output", str(output)]
    for change in changes:
        command += ["--set", f"{job}:{change}"]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
    return output


def measured(output: Path, job: str, measure: str) -> float:
    """Return a measure of a job from summary.json."""
    return float(json.loads((output / "summary.json").read_text())[job][measure])


def steps_of(output: Path, job: str) -> list[Mapping[str, float]]:
    """Return the records of a job's steps."""
    lines = (output / job / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "time/step" in record]
