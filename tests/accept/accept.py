"""The golden path through every part of the product: prints one JSON, a row a part; exits 1 if a part falls short."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import check_algorithms
import generation
import merging
import mixtures
import rollouts
import rounds
import tuning
from check_demo import PPO, Figure, Row, check, table

from rlhf_api.files import load
from rlhf_mapper.calibration import compare_phases
from rlhf_mapper.mapping import PHASES

ROOT = Path(__file__).resolve().parents[2]
RLHF = Path(sys.executable).with_name("rlhf")
EXAMPLE, SUMS = "examples/01-helpful-ppo.yaml", "examples/12-arithmetic-grpo.yaml"
CALCULATOR = "examples/18-calculator-grpo.yaml"
WITH_A_TOOL = (
    Figure(job="calculator-grpo", name="reward_after", least=0.9),
    Figure(job="calculator-alone", name="reward_after", most=0.45),
)
AGENT = "examples/21-agent-grpo.yaml"
BY_ITS_URL = (
    Figure(job="agent-grpo", name="reward_before", most=0.7),
    Figure(job="agent-grpo", name="reward_after", least=0.9),
)
SAMPLED_IDS = (
    "tests/trainer/agents/test_the_tree_holds_what_was_sampled.py",
    "tests/trainer/agents/test_vllm_answers_an_agent.py",
)
"""Tests of 10,000 conversations on a scripted engine, and of 200 on vLLM."""
ON_LINKS = {
    "RLHFuse": ("benchmarks/fusion.py",),
    "FusionLLM": ("benchmarks/thin_line.py",),
    "NOMA-MEC": ("benchmarks/upload.py", "--steps", "25"),
    "OneFlow": ("-m", "pytest", "-q", "tests/trainer/controller", "-k", "bytes"),
    "Reactor": ("-m", "pytest", "-q", "tests/trainer/placement/test_delays_change_no_bit.py"),
}
"""System -> command that measures what it gives, and fails where that is too little."""
LAST_LINES = 8
"""Of what such a command prints, for the row."""
LORA, LORA_GAIN = "examples/17-helpful-lora.yaml", 0.8
"""Of the win rate above a half, what adapters have to reach of what training all weights does."""
RIGHT_SUMS = (
    Figure(job="arithmetic-grpo", name="reward_before", most=0.3),
    Figure(job="arithmetic-grpo", name="reward_after", least=0.8),
)
LEARNED_BY_EXPERTS = (
    Figure(job="mixture-grpo", name="reward_before", most=0.4),
    Figure(job="mixture-grpo", name="reward_after", least=0.8),
)
OWN = """{name: Custom, entrypoint: "better_half:BetterHalf",
  options: {rewards: {normalization: Running, missingEndPenalty: 1.0}}}"""
LEARNT = (
    *(Figure(job="helpful-grpo", name=f"{each}_after", above=f"{each}_before") for each in check_algorithms.MEASURES),
    Figure(job="helpful-grpo", name="win_rate", least=0.55),
)
STOP_AFTER, TOLERANCE = 8, 1e-6
RESHARDED = (
    "training.totalSteps=3",
    "resources.slotsPerNode=4",
    "models.actor.parallelism.pipeline=2",
    "models.actor.parallelism.tensor=2",
    "rollout.tensorParallel=2",
    "evaluation.data.limit=48",
)
SIZES = ("two-layers-of-llama-3-8b", "qwen2.5-7b-8", "llama-3-70b-64")
"""Cases of tests.real_size."""
SIZED = {
    "a 32b with 16k": "32b --response 16k",
    "its real lengths": "32b --response 16k --mean 3k",
    "a 70b with LoRA": "70b --lora 16 --response 2k --mean 600 --gpus h100=8",
}
SIZE_KEYS = ("gpu", "gpus", "step_seconds", "low", "high", "hours", "cost")
"""Questions to `rlhf size`, and what is kept of an answer."""
RESHARDED_TOLERANCE, LEAST_LOSS = 1e-3, 1e-2
"""Of a loss that is cut otherwise, relative; losses near 0 are measured against this one."""


class FellShortError(Exception):
    """A part ran and did not do what it must; `measured` is its row all the same."""

    def __init__(self, message: str, measured: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.measured = dict(measured)


def run(folder: Path) -> dict[str, Any]:
    """`rlhf run` on this machine: its summary.json."""
    output = folder / "run"
    command = [str(RLHF), "run", EXAMPLE, "--output", str(output)]
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    if code:
        raise FellShortError(f"rlhf run exits with {code}", {"exit_code": code})
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    hold_to(check(summary), summary)
    return summary


def hold_to(rows: list[Row], summary: Mapping[str, Any]) -> None:
    """Print the figures of a summary; FellShortError if one is out of its range."""
    print(table(rows), file=sys.stderr)
    missed = [row.figure for row in rows if not row.good]
    if missed:
        raise FellShortError(f"missed: {', '.join(missed)}", summary)


def auto_mapping(folder: Path) -> dict[str, Any]:
    """Where `placement.mode: Auto` put the models of the PPO job of `run`, and its phases, predicted and measured."""
    job = folder / "run" / "helpful-ppo"
    mapping = json.loads((job / "mapping.json").read_text())
    predicted = mapping["predicted"]
    seconds = {**predicted["phases"], "step": predicted["step_seconds"]}
    compared = {each.phase: each for each in compare_phases(seconds, records(job / "metrics.jsonl"))}
    placed = [{name: pool[name] for name in ("models", "gpu", "gpus")} for pool in mapping["pools"]]
    row: dict[str, Any] = {"pools": placed, **{phase: each._asdict() for phase, each in compared.items()}}
    for each in compared.values():
        print("{:12} predicted {:7.3f} s, measured {:7.3f} s, ratio {:.2f}".format(*each), file=sys.stderr)
    missing = [phase for phase in PHASES if phase not in compared]
    if missing:
        raise FellShortError(f"not predicted or not measured: {', '.join(missing)}", row)
    row["ratio"] = sum(compared[phase].measured for phase in PHASES) / sum(seconds[phase] for phase in PHASES)
    print("measured / predicted, all phases: {:.2f}".format(row["ratio"]), file=sys.stderr)
    return row


def resume(folder: Path) -> dict[str, Any]:
    """The PPO job once more: stopped by SIGTERM in the middle, resumed, and held against the run that was not."""
    whole, output = folder / "run", folder / "resumed"
    for name in ("helpful-sft", "helpful-rm"):
        shutil.copytree(whole / name, output / name)
    command = [str(RLHF), "run", EXAMPLE, "--output", str(output)]
    stopped = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr)
    metrics = output / "helpful-ppo" / "metrics.jsonl"
    while stopped.poll() is None and not (metrics.is_file() and len(records(metrics)) >= STOP_AFTER):
        time.sleep(0.05)
    stopped.send_signal(signal.SIGTERM)
    row: dict[str, Any] = {"exit_code": stopped.wait(), "steps_before": len(records(metrics))}
    row["exit_code_resumed"] = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    mine, theirs = records(metrics), records(whole / "helpful-ppo" / "metrics.jsonl")
    row["steps"], row["largest_difference"] = len(mine), largest_difference(mine, theirs)
    weights = [path / "helpful-ppo" / "model" / "model.safetensors" for path in (output, whole)]
    row["same_weights"] = weights[0].read_bytes() == weights[1].read_bytes()
    expected = {"exit_code": 143, "exit_code_resumed": 0, "steps": len(theirs), "same_weights": True}
    wrong = [name for name, value in expected.items() if row[name] != value]
    if wrong or row["largest_difference"] > TOLERANCE or row["steps_before"] >= len(theirs):
        raise FellShortError(f"not the run that was never stopped: {', '.join(wrong) or row}", row)
    return row


def records(metrics: Path) -> list[dict[str, float]]:
    """The whole lines of metrics.jsonl."""
    return [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]


def largest_difference(mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    """Largest relative difference of a metric, leaving out those that measure the machine."""
    return max(
        abs(record[name] - value) / max(abs(value), 1e-12)
        for record, other in zip(mine, theirs, strict=False)
        for name, value in other.items()
        if not name.startswith(("time/", "tokens_per_second", "mfu", "busy/", "idle/", "memory_"))
    )


def algorithms(folder: Path) -> dict[str, Any]:
    """Examples of four algorithms on the models of `run`, in one run: summary.json, and what PPO's responses cost."""
    output, manifest = folder / "algorithms", folder / "algorithms.yaml"
    for name in ("helpful-sft", "helpful-rm"):
        shutil.copytree(folder / "run" / name, output / name)
    paths = [ROOT / "examples" / f"{name}.yaml" for name in check_algorithms.EXAMPLES]
    manifest.write_text("---\n".join(path.read_text() for path in paths))
    command = [str(RLHF), "run", str(manifest), "--output", str(output)]
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    if code:
        raise FellShortError(f"rlhf run exits with {code}", {"exit_code": code})
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    summary[check_algorithms.PPO]["cost_after"] = check_algorithms.mean_cost(output, check_algorithms.PPO)
    hold_to(check(summary, check_algorithms.FIGURES), summary)
    return summary


def custom_algorithm(folder: Path) -> dict[str, Any]:
    """Example 02 on the models of `run` by the algorithm of a project that `rlhf init` writes, outside the package."""
    project, output = folder / "project", folder / "custom_algorithm"
    subprocess.run([str(RLHF), "init", str(project)], check=True, stdout=sys.stderr)
    manifest = shutil.copy(ROOT / "examples" / "02-helpful-grpo.yaml", project)
    for name in ("helpful-sft", "helpful-rm"):
        shutil.copytree(folder / "run" / name, output / name)
    command = [str(RLHF), "run", str(manifest), "--output", str(output), "--set", f"algorithm={OWN}"]
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    if code:
        raise FellShortError(f"rlhf run exits with {code}", {"exit_code": code})
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())["helpful-grpo"]
    hold_to(check({"helpful-grpo": summary}, LEARNT), summary)
    return summary


def lora(folder: Path) -> dict[str, Any]:
    """PPO of `run` with adapters, on its models: what they win, and their bytes beside those of whole checkpoints."""
    output = folder / "lora"
    for name in ("helpful-sft", "helpful-rm"):
        shutil.copytree(folder / "run" / name, output / name)
    command = [str(RLHF), "run", LORA, "--output", str(output)]
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    if code:
        raise FellShortError(f"rlhf run exits with {code}", {"exit_code": code})
    summaries = [json.loads((each / "summary.json").read_text()) for each in (output, folder / "run")]
    row: dict[str, Any] = {"win_rate": summaries[0]["helpful-lora"]["win_rate"], "whole": summaries[1][PPO]["win_rate"]}
    row["share_of_the_gain"] = (row["win_rate"] - 0.5) / (row["whole"] - 0.5)
    for name, job in (("checkpoint_bytes", output / "helpful-lora"), ("whole_checkpoint_bytes", folder / "run" / PPO)):
        newest = max((job / "checkpoints").iterdir())
        row[name] = sum(file.stat().st_size for file in newest.rglob("shard-*"))
    if row["share_of_the_gain"] < LORA_GAIN or row["checkpoint_bytes"] >= row["whole_checkpoint_bytes"]:
        raise FellShortError("adapters win less than they should, or their checkpoints are no smaller", row)
    return row


def hybrid_engine(folder: Path) -> dict[str, Any]:
    """The first PPO steps with p-t-d 2-2-1 and p_g-t_g 1-2: their losses are those of `run`, where p and t are 1."""
    whole, output = folder / "run", folder / "hybrid_engine"
    for name in ("helpful-sft", "helpful-rm"):
        shutil.copytree(whole / name, output / name)
    command = [str(RLHF), "run", EXAMPLE, "--output", str(output)]
    for change in RESHARDED:
        command += ["--set", f"helpful-ppo:{change}"]
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    row: dict[str, Any] = {"exit_code": code}
    if code:
        raise FellShortError(f"rlhf run exits with {code}", row)
    mine, theirs = (records(path / "helpful-ppo" / "metrics.jsonl") for path in (output, whole))
    row["steps"] = len(mine)
    for name in ("loss/policy", "loss/value", "reward/mean"):
        row[name] = [record[name] for record in mine]
        row[f"{name} of data parallelism"] = [record[name] for record in theirs[: len(mine)]]
    row["reshard_bytes"] = max(record["bytes/reshard"] for record in mine)
    pairs = [
        (mine[step][name], theirs[step][name]) for step in range(len(mine)) for name in ("loss/policy", "loss/value")
    ]
    row["largest_difference"] = max(abs(one - other) / max(abs(other), LEAST_LOSS) for one, other in pairs)
    if row["largest_difference"] > RESHARDED_TOLERANCE or not row["reshard_bytes"]:
        raise FellShortError("not the losses of the run by data parallelism", row)
    return row


def verifiable_rewards(folder: Path) -> dict[str, Any]:
    """GRPO on sums by a verifier alone: summary.json, whose rewards are shares of the held-out sums that are right."""
    return _held_to(SUMS, RIGHT_SUMS, folder / "verifiable_rewards")


def environment(folder: Path) -> dict[str, Any]:
    """GRPO with a calculator and without: summary.json, whose rewards are shares of right answers, held-out."""
    return _held_to(CALCULATOR, WITH_A_TOOL, folder / "environment")


def agents(folder: Path) -> dict[str, Any]:
    """GRPO of an agent with its own loop and calculator; ids of random conversations are those that were sampled."""
    row: dict[str, Any] = {"summary": _held_to(AGENT, BY_ITS_URL, folder / "agents")}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SAMPLED_IDS]
    done = subprocess.run(tests, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    row["ids"] = done.stdout.strip().rpartition("\n")[2]
    if done.returncode:
        raise FellShortError("ids of agents' calls are not those that were sampled", row)
    return row


def _held_to(example: str, figures: tuple[Figure, ...], output: Path) -> dict[str, Any]:
    """The summary of an example, held to these figures."""
    command = [str(RLHF), "run", example, "--output", str(output)]
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    if code:
        raise FellShortError(f"rlhf run exits with {code}", {"exit_code": code})
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    hold_to(check(summary, figures), summary)
    return summary


def experts_and_context(folder: Path) -> dict[str, Any]:
    """A mixture of experts over two ranks learns sums; layouts with other experts, tokens and routing beside it."""
    output = folder / "experts_and_context"
    learned = _held_to(mixtures.EXAMPLE, LEARNED_BY_EXPERTS, output / "run")
    row = mixtures.cut_otherwise(output / "run", output)
    return _ok(
        row | {"summary": learned}, "other losses than on one rank, dropped tokens, or replay that does not help"
    )


def staleness(folder: Path) -> dict[str, Any]:
    """Stale responses of a rollout pool: what they cost in win rate and accuracy, and what they save."""
    return _ok(rollouts.staleness(folder), "stale responses lose too much, or save too little")


def streaming(folder: Path) -> dict[str, Any]:
    """Scoring beside the longest responses, and after them: `benchmarks/features.py streaming`."""
    return _ok(rollouts.streaming(folder), "streaming saves too little, or not what was predicted, or changes losses")


def delta(folder: Path) -> dict[str, Any]:
    """Changed weights alone for a rollout pool: their bytes beside those of all."""
    return _ok(rollouts.delta(folder), "changed weights are too many bytes, or give other losses")


def thin_lines(folder: Path) -> dict[str, Any]:
    """A figure for each system of docs/papers.md that saves time or bytes on links, or holds a run to its listing."""
    row: dict[str, Any] = {"DCT": rollouts.weight_store(folder)}
    missed = [] if row["DCT"]["ok"] else ["DCT"]
    for system, words in ON_LINKS.items():
        done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        row[system] = done.stdout.strip().splitlines()[-LAST_LINES:]
        missed += [system] if done.returncode else []
    if missed:
        raise FellShortError(f"{', '.join(missed)} fell short", row)
    return row


def of_rollouts(folder: Path) -> dict[str, Any]:
    """Corrections, weights of 8 bits, drafts, a teacher's student and prefix trees, each beside what it replaces."""
    return _ok(generation.all_of_them(folder), "a correction differs, drafts or rounding cost, or a student lags")


def between_runs(folder: Path) -> dict[str, Any]:
    """What people do between two runs: rounds, own asynchronous steps, tuning and merging; a figure a system."""
    found = rounds.rounds(folder)
    sums = folder / "replay" / "run"
    found["Auto-FedRL"] = {"tune": tuning.tune(sums, folder), "steered rate": tuning.steered_rate(sums, folder)}
    found["OTFusion"] = merging.merge(folder / "run", folder)
    oks = [each.pop("ok") for each in (*found["Auto-FedRL"].values(), found["OTFusion"])]
    found["ok"] = all((found["ok"], *oks))
    return _ok(found, "rounds or an own step learn too little, or tuning, a steered rate or a merge falls short")


def _ok(row: dict[str, Any], message: str) -> dict[str, Any]:
    if not row.pop("ok"):
        raise FellShortError(message, row)
    return row


def operator(folder: Path) -> dict[str, Any]:
    """The example on a Kubernetes with the chart; SIGKILL for the driver of PPO, and attempt 2 goes on from step 5."""
    output = folder / "operator"
    command = [sys.executable, "-m", "tests.cluster.demo", "--kill-driver", "--output", str(output)]
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    if code:
        raise FellShortError(f"tests.cluster.demo exits with {code}", {"exit_code": code})
    summary = json.loads((output / "summary.json").read_text())
    jobs = summary["jobs"]
    ppo = jobs[PPO]
    row = {
        "attempts": ppo["attempts"],
        "resumed_step": ppo["attempts"][-1]["firstStep"],
        "steps": {name: job["steps"] for name, job in jobs.items()},
        "reward": ppo["reward"],
        "seconds": summary["seconds"],
    }
    outcomes = [attempt["outcome"] for attempt in ppo["attempts"]]
    if outcomes != ["Failed", "Succeeded"] or row["resumed_step"] < 1:
        raise FellShortError("no second attempt that went on from a checkpoint", row)
    return row


def real_size(_: Path) -> dict[str, Any]:
    """The peak of each phase of a step at real sizes, counted on fake tensors, inside what a GPU holds; all in GB."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.real_size", "--json", *SIZES]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        raise FellShortError(f"tests.real_size exits with {done.returncode}", {"exit_code": done.returncode})
    row = {}
    for name, case in json.loads(done.stdout).items():
        peaks = {phase: measured["peak"] for phase, measured in case["phases"].items()}
        row[name] = {**{key: case[key] for key in ("peak", "bound", "fits")}, "phases": peaks}
        print(f"{name:28} peak {case['peak']:6.2f} GB of {case['bound']:.1f}", file=sys.stderr)
    too_large = [name for name, case in row.items() if not case["fits"]]
    if too_large:
        raise FellShortError(f"larger than a GPU: {', '.join(too_large)}", row)
    return row


def speed(folder: Path) -> dict[str, Any]:
    """What a step takes with the defaults, divided by what the machine needs for it at least; `benchmarks/step.py`."""
    output = folder / "speed.json"
    command = [sys.executable, "benchmarks/step.py", "--changes", "--rounds=1", "--steps=2", f"--json={output}"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    code = subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False).returncode
    if code:
        raise FellShortError(f"benchmarks/step.py exits with {code}", {"exit_code": code})
    found = json.loads(output.read_text())
    ratios = {name: column["of_limit"][0] for name, column in found["columns"].items()}
    return {"host": found["host"], "step / limit": ratios}


def auto_mapping_cluster(folder: Path) -> dict[str, Any]:
    """PPO of a 7B model on a claim, on made-up GPU nodes: the mapping of `rlhf plan`; on one small node the remedy."""
    output = folder / "mapped.json"
    command = [sys.executable, "-m", "tests.cluster.mapped", str(output)]
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    if code:
        raise FellShortError(f"tests.cluster.mapped exits with {code}", {"exit_code": code})
    row: dict[str, Any] = json.loads(output.read_text())
    if row["reasons"] != ["Mapped", "NoFeasiblePlacement"]:
        raise FellShortError("not mapped onto the large nodes, or not refused on the small one", row)
    same = all(row["operator"][name] == row["plan"][name] for name in ("pools", "sizes", "generation"))
    if not same or not math.isclose(row["operator"]["step_seconds"], row["plan"]["step_seconds"]):
        raise FellShortError("the operator's mapping is not that of rlhf plan", row)
    if "would do" not in row["refused"]:
        raise FellShortError("the refusal does not say what would do", row)
    return row


def shared_cluster(folder: Path) -> dict[str, Any]:
    """Twelve jobs with room for two, and two that need all of it: all in order; pods without a token are kept out."""
    row: dict[str, Any] = {}
    for name in ("shared", "attack"):
        output = folder / f"{name}.json"
        command = [sys.executable, "-m", f"tests.cluster.{name}", str(output)]
        code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
        if code:
            raise FellShortError(f"tests.cluster.{name} exits with {code}", {"exit_code": code, **row})
        row |= json.loads(output.read_text())
    outcomes = {outcome for part in ("turns", "pairs") for each in row[part]["outcomes"] for outcome in each}
    if outcomes != {"Succeeded"} or not row["turns"]["in_order"] or row["pairs"]["pods_meanwhile"]:
        raise FellShortError("a job lost an attempt, had its turn too early, or held room that was not enough", row)
    if row["open"]:
        raise FellShortError("a pod without a token was let in", row)
    return row


def clusters(folder: Path) -> dict[str, Any]:
    """Unusable GPUs, nodes that an autoscaler adds, backfill, an elastic pool, and a job that shrinks for another."""
    output = folder / "clusters.json"
    command = [sys.executable, "-m", "tests.cluster.clusters", str(output)]
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    if code:
        raise FellShortError(f"tests.cluster.clusters exits with {code}", {"exit_code": code})
    row: dict[str, Any] = json.loads(output.read_text())
    lives = [row["autoscaled"]["outcomes"], row["backfilled"]["wide"], row["backfilled"]["short"]]
    lives.append([slots for _, slots, _ in row["shrunk"]["attempts"]])
    if row["tainted"]["reason"] != "GPUNodesUnusable" or "dedicated=gpu:NoSchedule" not in row["tainted"]["told"]:
        raise FellShortError("the taint is not told", row)
    expected = [["Succeeded"], ["Succeeded"], ["Yielded", "Succeeded"], [2, 1, 2]]
    if lives != expected or row["autoscaled"]["eviction"] != 429:
        raise FellShortError("a job lost an attempt, or did not give its room back, or could be evicted", row)
    if len(row["elastic"]["told"]) != 3 or row["elastic"]["outcomes"] != ["Succeeded", "Succeeded"]:
        raise FellShortError("an elastic pool did not grow twice and shrink once, or cost an attempt", row)
    return row


def monitoring(folder: Path) -> dict[str, Any]:
    """A real Prometheus on a Kubernetes: targets up, rules that are evaluated, queries of dashboards with data."""
    output = folder / "monitoring"
    command = [sys.executable, "-m", "tests.cluster.monitoring", str(output)]
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    if not (output / "summary.json").exists():
        raise FellShortError(f"tests.cluster.monitoring exits with {code}", {"exit_code": code})
    found = json.loads((output / "summary.json").read_text())
    row = {
        "targets_up": sum(health == "up" for *_, health in found["targets"]),
        "series": found["series"],
        "rules_evaluated": sum(rule["health"] == "ok" for rule in found["rules"]),
        "rules": len(found["rules"]),
        "queries_with_data": sum(series > 0 for series in found["queries"].values()),
        "queries": len(found["queries"]),
        "without_data": [query for query, series in found["queries"].items() if not series],
    }
    if code:
        raise FellShortError("a target was down, a rule was not evaluated, or a query had no data", row)
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/monitoring"]
    if subprocess.run(tests, cwd=ROOT, stdout=sys.stderr, check=False).returncode:
        raise FellShortError("the tests of alerts and dashboards by promtool fail", row)
    return row


def foreign_inputs(_: Path) -> dict[str, Any]:
    """Inputs as other people have them, with the right result for each; SCRIPTS: folders with scripts to import."""
    command = [sys.executable, "-m", "tests.foreign", *os.environ.get("SCRIPTS", "").split()]
    found: dict[str, Any] = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    if found["wrong_cases"]:
        raise FellShortError(f"wrong: {', '.join(found['wrong_cases'])}", found)
    return found


def size(_: Path) -> dict[str, Any]:
    """Three questions to `rlhf size`: the chosen hardware of each, seconds with their interval, hours and money."""
    row: dict[str, Any] = {}
    for name, question in SIZED.items():
        command = [str(RLHF), "size", *question.split(), "--json"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise FellShortError(f"rlhf size exits with {done.returncode}", row | {name: done.returncode})
        found = json.loads(done.stdout)
        one = row[name] = {key: found["chosen"][key] for key in SIZE_KEYS}
        print("{:20} {gpus:4} x {gpu:12} {hours:6.1f} h {cost:8,.0f} USD".format(name, **one), file=sys.stderr)
        if not one["low"] < one["step_seconds"] < one["high"] or not load(found["files"]["job.yaml"]["text"]):
            raise FellShortError(f"{name}: no interval, or no manifest", row)
    if row["its real lengths"]["cost"] >= row["a 32b with 16k"]["cost"]:
        raise FellShortError("shorter responses are no cheaper", row)
    return row


def why(folder: Path) -> dict[str, Any]:
    """The planted causes and the healthy runs by their records; one plant is run anew and its cause is asked for."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.why.figures"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    row: dict[str, Any] = json.loads(done.stdout)
    for name, places in row["place of the true cause"].items():
        print(f"{name:14} {places}", file=sys.stderr)
    output = folder / "why"
    plants = [sys.executable, "-m", "tests.trainer.why.anew", str(output), "scale", "7"]
    subprocess.run(plants, cwd=ROOT, stdout=sys.stderr, check=True)
    asked = subprocess.run([str(RLHF), "why", str(output), "--json"], stdout=subprocess.PIPE, check=True)
    row["anew"] = [cause["cause"] for cause in json.loads(asked.stdout)["scale-7"]["causes"]]
    if not row["holds"] or row["anew"][:1] != ["RewardScale"]:
        raise FellShortError("fewer causes are found, or more healthy runs give an alarm, than docs/why.md says", row)
    return row


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "run": run,
    "auto_mapping": auto_mapping,
    "resume": resume,
    "algorithms": algorithms,
    "custom_algorithm": custom_algorithm,
    "lora": lora,
    "hybrid_engine": hybrid_engine,
    "operator": operator,
    "real_size": real_size,
    "speed": speed,
    "auto_mapping_cluster": auto_mapping_cluster,
    "shared_cluster": shared_cluster,
    "clusters": clusters,
    "verifiable_rewards": verifiable_rewards,
    "environment": environment,
    "agents": agents,
    "experts_and_context": experts_and_context,
    "streaming": streaming,
    "staleness": staleness,
    "delta": delta,
    "thin_lines": thin_lines,
    "rollouts": of_rollouts,
    "rounds": between_runs,
    "monitoring": monitoring,
    "foreign_inputs": foreign_inputs,
    "size": size,
    "why": why,
}
"""A part's row, by name, in order; they share a folder that is deleted afterwards, and raise FellShortError."""


def main() -> int:
    """Run the parts in order, all or those named in ROWS; a part that falls short does not stop the others."""
    chosen = os.environ.get("ROWS", ",".join(PARTS)).split(",")
    if unknown := set(chosen) - set(PARTS):
        sys.exit(f"ROWS: no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    row: dict[str, Any] = {}
    code = 0
    with tempfile.TemporaryDirectory(prefix="rlhf-accept-") as name:
        for part, measure in ((part, PARTS[part]) for part in PARTS if part in chosen):
            print(f"== {part}", file=sys.stderr)
            try:
                row[part] = measure(Path(name))
            except FellShortError as error:
                print(f"error: {part}: {error}", file=sys.stderr)
                row[part], code = error.measured, 1
    print(json.dumps(row, indent=2))
    return code


if __name__ == "__main__":
    sys.exit(main())
