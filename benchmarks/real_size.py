"""GRPO and PPO at a real size on this machine's CPU: python benchmarks/real_size.py [--json PATH] [GRPO] [PPO].

Every model has Qwen2.5-0.5B's exact shape (494 million parameters, vocabulary 151,936) and random bfloat16 weights.
`rlhf run` trains them with Ray, FSDP2 and vLLM on two CPU slots, in bfloat16 with float32 master weights: 2 steps of 8
responses of 32 tokens to prompts of 32. Peaks are each process's own (VmHWM); code that processes share counts in each
of them. Exit code 1 if a run fails or the peaks add up to more than 24 GiB. Needs 15 GB of disk for a while.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from work import PHASES, PROMPT_TOKENS, apart, make_prompts, manifest, tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests is not installed

from rlhf_api.job import Job
from rlhf_mapper.mapping import STAGES, DeviceMapping
from rlhf_planning.job_plan import plan_job
from rlhf_planning.machines import local_cluster
from rlhf_trainer.run.shapes import shapes_of
from tests.real_size.shapes import SHAPES
from tests.real_size.step import Case, measure

GB = 1e9
LIMIT = 24 * 2**30
"""Bytes that all processes of a run may hold together, each at its own peak."""
SHAPE, SLOTS, STEPS, RESPONSES, RESPONSE_TOKENS = "Qwen2.5-0.5B", 2, 2, 8, 32
SAMPLES = {"GRPO": 4, "PPO": 1}
"""Responses to a prompt."""
RULE = "rlhf_examples.helpful.rule:score"
WATCH_SECONDS = 0.2
LIBRARIES = "import rlhf_trainer.run.on_ray, rlhf_trainer.generation.vllm_extension; from vllm import LLM"
"""Modules that a slot's process imports before it holds a model."""
SLOT, CONTROLLER, RAY = "slot", "controller", "Ray's own processes"


def make_models(folder: Path) -> None:
    """Write an actor and a reward model with random weights, and the prompts."""
    words = tokenizer()
    torch.manual_seed(0)
    makers = {"actor": AutoModelForCausalLM, "scorer": AutoModelForSequenceClassification}
    for name, maker in makers.items():
        config = SHAPES[SHAPE].from_dict({**SHAPES[SHAPE].to_dict(), "num_labels": 1})
        maker.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    make_prompts(folder / "prompts.jsonl", RESPONSES * STEPS)


def job_of(algorithm: str, folder: Path) -> dict[str, Any]:
    """The manifest; all models share both slots. GRPO has a reward model, PPO a critic and a rule as its reward."""
    job = manifest(folder, algorithm, steps=STEPS)
    spec, samples = job["spec"], SAMPLES[algorithm]
    scorer = {"uri": f"file://{folder}/scorer"}
    spec["models"]["reward"] = scorer if algorithm == "GRPO" else {"entrypoint": RULE}
    spec["data"]["maxResponseTokens"] = RESPONSE_TOKENS
    spec["rollout"] = {"samplesPerPrompt": samples}
    batch = {"promptBatchSize": RESPONSES // samples, "miniBatchSize": RESPONSES}
    spec["training"] |= {**batch, "microBatchTokens": _tokens_of_slot(), "precision": "BF16"}
    placed = [role for role, model in spec["models"].items() if "uri" in model]
    pool = {"name": "all", "models": placed, "slotsPerNode": SLOTS}
    return job | {"spec": spec | {"placement": {"mode": "Manual", "pools": [pool]}}}


def _tokens_of_slot() -> int:
    return RESPONSES // SLOTS * (PROMPT_TOKENS + RESPONSE_TOKENS)


def mapped_bytes(job: dict[str, Any]) -> int:
    """Return the mapper's bytes of a slot in the fullest moment of a step (`rlhf plan`), without libraries."""
    parsed = Job.parse(job)
    shapes = shapes_of([parsed], parsed, Path())
    mapping = plan_job(parsed, local_cluster(parsed, lambda: ()), shapes, device="CPU")
    assert isinstance(mapping, DeviceMapping), mapping
    (pool,), predicted = mapping.pools, mapping.prediction
    assert predicted, "the shapes are known"
    return int(max(sum(predicted.peak(pool.models, stage).values()) for stage in STAGES))


def counted_bytes(algorithm: str) -> int:
    """Return the bytes that the workers allocate on a slot in a step, counted on fake tensors (`tests/real_size`)."""
    case = Case(
        shape=SHAPE,
        ranks=SLOTS,
        algorithm=algorithm,
        scored_by_model=algorithm == "GRPO",
        rows=RESPONSES // SLOTS,
        prompt=PROMPT_TOKENS,
        response=RESPONSE_TOKENS,
        micro_batch_tokens=_tokens_of_slot(),
        recompute=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        live = measure(case, Path(folder))
    return max(phase.peak for phase in live.phases.values())


def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run the job: seconds of the run and of each phase of its last step, and each process's peak.

    SystemExit if the run fails.
    """
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "rlhf_trainer", "run", str(folder / "job.yaml"), "--output"]
    began = time.monotonic()
    with subprocess.Popen([*command, str(folder / "run")], stdout=sys.stderr) as process:
        peaks = watched(process)
    if process.returncode:
        held = ", ".join(f"{name} {peak / GB:.2f} GB" for name, peak in peaks.items())
        raise SystemExit(f"rlhf run ended with exit code {process.returncode}; peaks: {held}")
    seconds = time.monotonic() - began
    lines = (folder / "run" / job["metadata"]["name"] / "metrics.jsonl").read_text().splitlines()
    return {"seconds": seconds, "peaks": peaks, "step": json.loads(lines[-1])}


def watched(process: subprocess.Popen[bytes]) -> dict[str, int]:
    """Bytes of the peak of each process of a run, until it ends; Ray's own processes are added up."""
    found: dict[int, tuple[str, int]] = {}
    root = psutil.Process(process.pid)
    while process.poll() is None:
        for each in [root, *root.children(recursive=True)]:
            if seen := _name_and_peak(each, root):
                found[each.pid] = seen
        time.sleep(WATCH_SECONDS)
    peaks: dict[str, int] = {}
    for name, peak in found.values():
        own = f"{SLOT} {sum(key.startswith(SLOT) for key in peaks)}" if name == SLOT else name
        peaks[own] = peaks.get(own, 0) + peak
    return peaks


def _name_and_peak(process: psutil.Process, root: psutil.Process) -> tuple[str, int] | None:
    """Return the kind of a process and its peak bytes; None if it has ended."""
    try:
        title = " ".join(process.cmdline())
        status = Path(f"/proc/{process.pid}/status").read_text()
    except (psutil.Error, OSError):
        return None
    if not (found := re.search(r"VmHWM:\s+(\d+) kB", status)):
        return None
    name = SLOT if "SlotProcess" in title else CONTROLLER if process == root else RAY
    return name, int(found[1]) * 1024


def library_bytes() -> int:
    """The peak of a process that has imported what a slot imports."""
    script = f"{LIBRARIES}; print(open('/proc/self/status').read())"
    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    found = re.search(r"VmHWM:\s+(\d+) kB", printed)
    assert found, printed
    return int(found[1]) * 1024


def measured(algorithm: str, models: Path, libraries: int) -> dict[str, Any]:
    """A run of the algorithm beside its predictions."""
    job = job_of(algorithm, models)
    mapped, counted = apart(mapped_bytes, job), apart(counted_bytes, algorithm)
    with tempfile.TemporaryDirectory() as folder:
        found = run(job, Path(folder))
    return {"libraries": libraries, "mapped": mapped, "counted": counted, "sum": sum(found["peaks"].values()), **found}


def show(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Tables of the peaks and of the seconds."""
    memory = Table(title="peak memory of each process, GB")
    for column in ("", "process", "libraries", "+ mapper", "+ counted", "measured"):
        memory.add_column(column, justify="left" if column in ("", "process") else "right")
    for name, result in results.items():
        for process, peak in sorted(result["peaks"].items(), key=lambda each: not each[0].startswith(SLOT)):
            parts = [result["libraries"], result["mapped"], result["counted"]] if process.startswith(SLOT) else []
            cells = [f"{part / GB:.2f}" for part in parts] or ["", "", ""]
            memory.add_row(name, process, *cells, f"{peak / GB:.2f}")
        memory.add_row(name, "sum", "", "", "", f"{result['sum'] / GB:.2f}", end_section=True)
    seconds = Table(title="seconds of the second step")
    seconds.add_column("phase")
    for name in results:
        seconds.add_column(name, justify="right")
    for phase in (*PHASES, "step"):
        seconds.add_row(phase, *(f"{result['step'].get(f'time/{phase}', 0.0):.2f}" for result in results.values()))
    seconds.add_row("the whole run", *(f"{result['seconds']:.0f}" for result in results.values()))
    for table in (memory, seconds):
        Console(width=100).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algorithms", nargs="*", metavar="ALGORITHM", help=f"{' or '.join(SAMPLES)}; default: both")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if unknown := set(options.algorithms) - set(SAMPLES):
        parser.error(f"{min(unknown)} is neither {' nor '.join(SAMPLES)}")
    libraries = library_bytes()
    with tempfile.TemporaryDirectory() as models:
        apart(make_models, Path(models))
        results = {name: measured(name, Path(models), libraries) for name in options.algorithms or SAMPLES}
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    too_much = [name for name, result in results.items() if result["sum"] > LIMIT]
    for name in too_much:
        print(f"{name}: the peaks add up to {results[name]['sum'] / 2**30:.1f} GiB, more than 24", file=sys.stderr)
    return int(bool(too_much))


if __name__ == "__main__":
    sys.exit(main())
