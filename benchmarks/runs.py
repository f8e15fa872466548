"""Whole runs of `rlhf run`: memory at a real size, growth over many steps.

    python benchmarks/runs.py size [--algorithms GRPO PPO] [--json PATH]
    python benchmarks/runs.py soak FOLDER [--steps 2000] [--svg PATH]

`size`: GRPO and PPO of models of Qwen2.5-0.5B's exact shape (494 million parameters, vocabulary 151,936) with random
bfloat16 weights. Ray, FSDP2 and vLLM run on two CPU slots, in bfloat16 with float32 master weights: 2 steps of 8
responses of 32 tokens to prompts of 32. Peaks are each process's own (VmHWM); code that processes share counts in each
of them. Exit code 1 if a run fails or the peaks add up to more than 24 GiB. Needs 15 GB of disk for a while.

`soak`: PPO steps of the small model of benchmarks/work.py, in pieces. It looks at all processes of the run every few
steps, and prints the growth of memory (RSS), handles and threads of each, and of the machine's shared memory. Ctrl-C
ends a piece: the same command continues, and without a step left it only shows the result. Each piece has processes of
its own, whose first steps are not counted.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import linear_regression, median
from typing import Any, TextIO

import psutil
import torch
import yaml
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from work import PHASES, PROMPT_TOKENS, SAMPLES, SIZES, apart, changed, make_inputs, make_prompts, manifest, tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests is not installed

from rlhf_api.job import Job
from rlhf_mapper.mapping import STAGES, DeviceMapping
from rlhf_planning.job_plan import plan_job
from rlhf_planning.machines import local_cluster
from rlhf_trainer.run.shapes import shapes_of
from tests.real_size.shapes import SHAPES
from tests.real_size.step import Case, measure

ROOT = Path(__file__).resolve().parents[1]
CONSOLE = Console(width=120)
CONTROLLER, RANK, AGENT = "controller", "rank", "agent"
KINDS = {
    "SlotProcess": RANK,
    "gcs_server": "Ray's GCS",
    "raylet/raylet": "raylet",
    "rlhf_trainer.rewards.function": "reward",
}
"""Part of a command line -> kind of the process; any other but the driver is an agent of Ray's."""
Figures = dict[str, Any]

GB = 1e9
LIMIT = 24 * 2**30
"""Bytes that all processes of a run may hold together, each at its own peak."""
SHAPE, SLOTS, STEPS, RESPONSES, RESPONSE_TOKENS = "Qwen2.5-0.5B", 2, 2, 8, 32
TOKENS_OF_SLOT = RESPONSES // SLOTS * (PROMPT_TOKENS + RESPONSE_TOKENS)
WATCH_SECONDS = 0.2
LIBRARIES = "import rlhf_trainer.run.on_ray, rlhf_trainer.generation.vllm_extension; from vllm import LLM"
"""Modules that a slot's process imports before it holds a model."""

EVERY, WARM_UP, WINDOW = 10, 100, 100
"""Steps between two looks; steps of a piece that are not counted; steps at both ends whose times are compared."""
SMALL: Mapping[str, Mapping[str, Any]] = {
    "data": {"maxResponseTokens": 16},
    "rollout": {"minResponseTokens": 16},
    "training": {"promptBatchSize": 8},
    "resources": {"slotsPerNode": 2},
    "checkpoint": {"everySteps": 50},
}
UNITS = {"MB": 1e6, "handles": 1, "threads": 1}


def command(job: Path, output: Path, *more: str) -> list[str]:
    """Command line of `rlhf run`."""
    return [sys.executable, "-m", "rlhf_trainer", "run", str(job), "--output", str(output), *more]


def processes_of(run: psutil.Process) -> Iterator[tuple[str, psutil.Process]]:
    """Yield (kind, process) of the run's process and its descendants that have not ended."""
    yield CONTROLLER, run
    for process in sorted(run.children(recursive=True), key=lambda child: child.pid):
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            yield next((kind for part, kind in KINDS.items() if part in line), AGENT), process


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
    if algorithm == "GRPO":
        spec["models"]["reward"] = {"uri": f"file://{folder}/scorer"}
    spec["data"]["maxResponseTokens"] = RESPONSE_TOKENS
    spec["rollout"] = {"samplesPerPrompt": samples}
    batch = {"promptBatchSize": RESPONSES // samples, "miniBatchSize": RESPONSES}
    spec["training"] |= {**batch, "microBatchTokens": TOKENS_OF_SLOT, "precision": "BF16"}
    placed = [role for role, model in spec["models"].items() if "uri" in model]
    pool = {"name": "all", "models": placed, "slotsPerNode": SLOTS}
    return job | {"spec": spec | {"placement": {"mode": "Manual", "pools": [pool]}}}


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
        micro_batch_tokens=TOKENS_OF_SLOT,
        recompute=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        live = measure(case, Path(folder))
    return max(phase.peak for phase in live.phases.values())


def run_and_watch(job: dict[str, Any], folder: Path) -> Figures:
    """Run the job: its seconds, its last step, and each process's peak bytes. SystemExit if the run fails."""
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    began = time.monotonic()
    with psutil.Popen(command(folder / "job.yaml", folder / "run"), stdout=sys.stderr) as process:
        peaks = peaks_of(process)
    if process.returncode:
        held = ", ".join(f"{name} {peak / GB:.2f} GB" for name, peak in peaks.items())
        raise SystemExit(f"rlhf run ended with exit code {process.returncode}; peaks: {held}")
    seconds = time.monotonic() - began
    lines = (folder / "run" / job["metadata"]["name"] / "metrics.jsonl").read_text().splitlines()
    return {"seconds": seconds, "peaks": peaks, "step": json.loads(lines[-1])}


def peaks_of(run: psutil.Popen) -> dict[str, int]:
    """Peak bytes of each process of a run, until it ends; Ray's own processes are added up."""
    found: dict[int, tuple[str, int]] = {}
    while run.poll() is None:
        now = {process.pid: (kind, peak_of(process.pid)) for kind, process in processes_of(run)}
        found |= {pid: seen for pid, seen in now.items() if seen[1]}
        time.sleep(WATCH_SECONDS)
    peaks: Counter[str] = Counter()
    for kind, peak in found.values():
        ranks = sum(name.startswith(RANK) for name in peaks)
        peaks[f"{RANK} {ranks}" if kind == RANK else kind if kind == CONTROLLER else "Ray's own processes"] += peak
    return dict(peaks)


def peak_of(pid: int) -> int:
    """Return the peak bytes of a process; 0 if it has ended."""
    with suppress(OSError):
        return peak_in(Path(f"/proc/{pid}/status").read_text())
    return 0


def peak_in(status: str) -> int:
    """Return the peak bytes that the text of /proc/PID/status gives; 0 for a process that has ended."""
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def library_bytes() -> int:
    """The peak of a process that has imported what a slot imports."""
    script = f"{LIBRARIES}; print(open('/proc/self/status').read())"
    return peak_in(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)


def measured(algorithm: str, models: Path, libraries: int) -> Figures:
    """A run of the algorithm beside its predictions."""
    job = job_of(algorithm, models)
    mapped, counted = apart(mapped_bytes, job), apart(counted_bytes, algorithm)
    with tempfile.TemporaryDirectory() as folder:
        found = run_and_watch(job, Path(folder))
    return {"libraries": libraries, "mapped": mapped, "counted": counted, "sum": sum(found["peaks"].values()), **found}


def show_sizes(results: Mapping[str, Figures]) -> None:
    """Tables of the peaks and of the seconds."""
    columns = ("", "process", "libraries", "+ mapper", "+ counted", "measured")
    memory = Table(*columns, title="peak memory of each process, GB")
    for name, result in results.items():
        for process, peak in sorted(result["peaks"].items(), key=lambda each: not each[0].startswith(RANK)):
            parts = [result["libraries"], result["mapped"], result["counted"]] if process.startswith(RANK) else []
            cells = [f"{part / GB:.2f}" for part in parts] or ["", "", ""]
            memory.add_row(name, process, *cells, f"{peak / GB:.2f}")
        memory.add_row(name, "sum", "", "", "", f"{result['sum'] / GB:.2f}", end_section=True)
    seconds = Table("phase", *results, title="seconds of the second step")
    for phase in (*PHASES, "step"):
        seconds.add_row(phase, *(f"{result['step'].get(f'time/{phase}', 0.0):.2f}" for result in results.values()))
    seconds.add_row("the whole run", *(f"{result['seconds']:.0f}" for result in results.values()))
    for table in (memory, seconds):
        CONSOLE.print(table)


def size(options: argparse.Namespace) -> None:
    """Measure each algorithm at the real size. SystemExit if the peaks add up to more than the limit."""
    libraries = library_bytes()
    with tempfile.TemporaryDirectory() as models:
        apart(make_models, Path(models))
        results = {name: measured(name, Path(models), libraries) for name in options.algorithms}
    show_sizes(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    too_much = {name: result["sum"] for name, result in results.items() if result["sum"] > LIMIT}
    if too_much:
        raise SystemExit(f"peaks that add up to more than {LIMIT / 2**30:.0f} GiB: {too_much} bytes")


def soak(options: argparse.Namespace) -> None:
    """Run until all steps are done, or Ctrl-C, and show what the looks of all pieces found."""
    folder: Path = options.folder.resolve()
    if not (folder / "prompts.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_inputs(folder, SIZES["0.7M"])
    job = changed(manifest(folder, "PPO", steps=options.steps), SMALL)
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    with (folder / "log").open("a") as log:
        run = psutil.Popen(command(folder / "job.yaml", folder / "run"), stdout=log, stderr=log)
    with (folder / "soak.jsonl").open("a") as file, suppress(KeyboardInterrupt):
        watch(run, folder / "run" / "step" / "metrics.jsonl", file)
    with suppress(psutil.NoSuchProcess):
        run.terminate()
    run.wait()
    show_soak(folder, options.svg)


def watch(run: psutil.Popen, metrics: Path, file: TextIO) -> None:
    """Write a line for each process every few steps, until the run ends."""
    looked = None
    while run.poll() is None:
        time.sleep(WATCH_SECONDS)
        done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if looked is None or done >= looked + EVERY:
            looked = done
            file.writelines(json.dumps({"step": done, "run": run.pid, **look}) + "\n" for look in looks(run))
            file.flush()


def looks(run: psutil.Process) -> Iterator[Figures]:
    """Yield what each process of a run holds, and the machine's shared memory."""
    numbered: Counter[str] = Counter()
    for kind, process in processes_of(run):
        with suppress(psutil.Error):
            held = {"MB": process.memory_info().rss, "handles": process.num_fds(), "threads": process.num_threads()}
            name = f"{kind} {numbered[kind]}" if kind in (RANK, "reward", AGENT) else kind
            numbered[kind] += 1
            yield {"process": name, **{unit: value / UNITS[unit] for unit, value in held.items()}}
    yield {"process": "/dev/shm", "MB": psutil.disk_usage("/dev/shm").used / 1e6}


def slopes(found: Sequence[Figures]) -> dict[str, dict[str, tuple[float, float]]]:
    """Process -> unit -> (median held, growth in 1,000 steps), over the counted steps of all pieces."""
    begun: dict[int, int] = {}
    for line in found:
        begun.setdefault(line["run"], line["step"])
    counted = [line for line in found if line["step"] >= begun[line["run"]] + WARM_UP]
    result: defaultdict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for process, unit in product(dict.fromkeys(line["process"] for line in counted), UNITS):
        mine = [line for line in counted if line["process"] == process and unit in line]
        pieces = [[(line["step"], line[unit]) for line in mine if line["run"] == run] for run in begun]
        if pieces := [piece for piece in pieces if len(piece) > 1]:
            result[process][unit] = median(value for piece in pieces for _, value in piece), slope(pieces)
    return result


def slope(pieces: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Return the growth in 1,000 steps: the slopes of the pieces, weighted by their steps."""
    weights = [piece[-1][0] - piece[0][0] for piece in pieces]
    each = [linear_regression(*zip(*piece, strict=True)).slope for piece in pieces]
    return 1000 * sum(weight * found for weight, found in zip(weights, each, strict=True)) / sum(weights)


def show_soak(folder: Path, svg: Path | None) -> None:
    """Print the growth of each process, and draw its memory by step."""
    found = [json.loads(line) for line in (folder / "soak.jsonl").read_text().splitlines()]
    times = [json.loads(line)["time/step"] for line in (folder / "run/step/metrics.jsonl").read_text().splitlines()]
    title = f"{len(times)} steps in {len({line['run'] for line in found})} pieces"
    table = Table("process", *(f"{unit}, in 1,000 steps" for unit in UNITS), title=title)
    for process, units in slopes(found).items():
        cells = [f"{units[unit][0]:.0f} {units[unit][1]:+.2f}" if unit in units else "" for unit in UNITS]
        table.add_row(process, *cells)
    CONSOLE.print(table)
    if len(times) >= WARM_UP + 2 * WINDOW:
        first, last = median(times[WARM_UP : WARM_UP + WINDOW]), median(times[-WINDOW:])
        print(f"median step: {first:.3f} s after warm-up, {last:.3f} s at the end ({last / first - 1:+.1%})")
    if svg:
        draw(found, svg)


def draw(found: Sequence[Figures], svg: Path) -> None:
    """Draw the memory of each process by step."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "soak"
    figure, axes = plt.subplots(figsize=(8, 4))
    for process in dict.fromkeys(line["process"] for line in found):
        mine = [line for line in found if line["process"] == process]
        axes.plot([line["step"] for line in mine], [line["MB"] for line in mine], label=process)
    axes.set(xlabel="step", ylabel="MB", yscale="log")
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(svg, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    for run in (size, soak):
        kinds.add_parser(run.__name__).set_defaults(run=run)
    kinds.choices["size"].add_argument("--algorithms", nargs="+", choices=SAMPLES, default=list(SAMPLES))
    kinds.choices["soak"].add_argument("folder", type=Path)
    kinds.choices["soak"].add_argument("--steps", type=int, default=2000)
    kinds.choices["soak"].add_argument("--svg", type=Path)
    kinds.choices["size"].add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
