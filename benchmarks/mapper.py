"""The auto-mapper against what is known: python benchmarks/mapper.py [--json PATH] [PART ...].

Parts: throughput, placements, transition, generation, points, public, passes, scaling, defects, real; by default all
but the last, which takes minutes. All figures but those of `real` are predictions: nothing runs on a GPU. `real` trains
the tiny model with Ray on CPU slots in several placements, predicts each from one of them, and says how far it was off.
Published figures are those of testbed.py (HybridFlow) and public.py in tests/mapper/oracles.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from work import SIZES, changed, make_inputs, manifest, run

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests is not installed

from rlhf_mapper.auto_map import MappingProblem
from rlhf_mapper.calibration import Compared, compare_phases, correction_of
from rlhf_mapper.coefficients import TRAINER, Correction, software_for
from rlhf_mapper.hardware import GPUS, Cluster, NodeGroup
from rlhf_mapper.mapping import PHASES, Phase
from rlhf_mapper.pools import PoolCosts
from rlhf_mapper.prediction import cuts_of
from rlhf_mapper.search.pruned import pruned
from rlhf_planning.timeline import interval_text
from tests.mapper import plan_defects
from tests.mapper.oracles import public, testbed
from tests.mapper.oracles.exhaustive import exhaustive

TOKENS = 1024 * 2048
CONSOLE = Console(width=120)
MOST_EXHAUSTIVE = 16
"""Nodes on which every allocation is tried."""
GPU_COUNTS = (8, 16, 32, 64, 96, 128)
EVEN, ODD = 65_536, 40_320
"""Batches; an eighth of the second has more divisors than any smaller number."""


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows; the first column to the left."""
    printed = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        printed.add_column(column, justify="right" if place else "left")
    for row in rows:
        printed.add_row(*map(str, row))
    CONSOLE.print(printed)


def best_of(size: testbed.Size, gpus: int, recipe: testbed.Recipe, *, layout: bool = True) -> tuple[float, str]:
    """(predicted tokens/s, pools) of the best mapping; 0 where nothing fits."""
    found = pruned(testbed.costs_of(size, gpus, recipe, layout=layout), testbed.roles(recipe), keep=1)
    if not found:
        return 0.0, ""
    sets = found[0].sets
    named = [f"{'+'.join(sorted(models))} {count}" for models, _, count in sets]
    return TOKENS / found[0].seconds, " | ".join(named) if len(sets) > 1 else "all together"


def throughput() -> dict[str, Any]:
    """PPO of HybridFlow: predicted and published."""
    rows, off, off_free = [], [], []
    for (size, gpus), published in testbed.THROUGHPUT.items():
        predicted, pools = best_of(size, gpus, "PPO")
        free, _ = best_of(size, gpus, "PPO", layout=False)
        off.append(predicted / published - 1)
        off_free.append(abs(free / published - 1))
        rows.append((size, gpus, f"{published:,.0f}", f"{predicted:,.0f}", f"{off[-1]:+.1%}", f"{free:,.0f}", pools))
    columns = ("model", "GPUs", "published", "predicted", "off", "layouts free", "pools")
    table("PPO tokens/s on HybridFlow's testbed (predicted)", columns, rows)
    CONSOLE.print(f"with free layouts off by {mean(off_free):.1%} on average, {max(off_free):.1%} at worst")
    return {"rows": rows, "largest": max(map(abs, off)), "mean": mean(map(abs, off))}


def public_steps() -> dict[str, Any]:
    """Published steps of GRPO, as the mapper plans them, with their intervals."""
    rows, off, inside = [], [], []
    for step in public.usable_steps():
        mapping = public.mapped_step(step)
        assert mapping
        assert mapping.prediction
        predicted, published = mapping.prediction, step["step_seconds"]
        off.append(predicted.step_seconds / published - 1)
        inside.append(predicted.low <= published <= predicted.high)
        interval = interval_text(predicted.step_seconds, predicted.low, predicted.high)
        cells = (f"{published:.0f}", interval, f"{off[-1]:+.0%}", str(mapping.sizes["actor"]))
        rows.append((step["id"], step["mode"].split(",")[0], step["mean_response_tokens"], *cells))
    columns = ("step", "mode", "mean tokens", "published", "predicted", "off", "actor p-t-d")
    table("seconds of GRPO with responses of many lengths (predicted)", columns, rows)
    CONSOLE.print(f"off by {mean(map(abs, off)):.0%} on average; {sum(inside)} of {len(inside)} inside")
    return {"rows": rows, "mean": mean(map(abs, off)), "largest": max(map(abs, off)), "inside": mean(inside)}


def public_passes() -> dict[str, Any]:
    """Phases, updates and decode steps against measurements, by source; serving rows as a mean."""
    software, rows = public.software_of(TRAINER.efficiency), []
    serving: list[float] = []
    for point in public.phase_points():
        predicted = point.predict(software)
        if point.source == "aisimulate":
            serving.append(abs(predicted / point.seconds - 1))
            continue
        off = f"{predicted / point.seconds - 1:+.0%}"
        rows.append((point.name, point.kind, f"{point.seconds:.4g}", f"{predicted:.4g}", off))
    table(
        "seconds of phases, updates and decode steps (predicted)", ("point", "", "measured", "predicted", "off"), rows
    )
    CONSOLE.print(f"serving: {len(serving)} rows off by {mean(serving):.1%} on average, {max(serving):.0%} at worst")
    return {"rows": rows, "serving": mean(serving)}


def placed(gpus: int, sets: Sequence[frozenset[Any]]) -> float:
    """Predicted tokens/s of a placement with its best allocation; 0 where it does not fit."""
    costs = testbed.costs_of("13B", gpus)
    budget, found = gpus, math.inf
    tables = [costs.of(each, 0) for each in sets]
    for sizes in _splits([list(map(int, one.gpus)) for one in tables], budget):
        at = [int(np.searchsorted(one.gpus, size)) for one, size in zip(tables, sizes, strict=True)]
        stages = np.max([one.seconds[:, place] for one, place in zip(tables, at, strict=True)], axis=0)
        found = min(found, float(stages.sum()))
    return TOKENS / found


def _splits(choices: Sequence[Sequence[int]], budget: int) -> list[tuple[int, ...]]:
    """Every way to give each set one of its sizes within the budget."""
    if not choices:
        return [()]
    return [(size, *rest) for size in choices[0] if size <= budget for rest in _splits(choices[1:], budget - size)]


def placement_study() -> dict[str, Any]:
    """13B PPO: which placement wins on how many GPUs, published and predicted."""
    rows: list[Sequence[object]] = []
    results: dict[str, Any] = {}
    for gpus, published in testbed.PLACED.items():
        predicted = {name: placed(gpus, sets) for name, sets in testbed.PLACEMENTS.items()}
        winner, ours = max(published, key=published.__getitem__), max(predicted, key=predicted.__getitem__)
        second = sorted(published.values())[-2]
        gap, regret = published[winner] / second - 1, 1 - published[ours] / published[winner]
        free, pools = best_of("13B", gpus, "PPO")
        cells = [f"{published[name] / 1e3:.1f} / {predicted[name] / 1e3:.1f}" for name in published]
        rows.append((gpus, *cells, winner, ours, f"{gap:.1%}", f"{regret:.1%}", f"{free / 1e3:.1f} {pools}"))
        results[str(gpus)] = {"published": winner, "predicted": ours, "gap": gap, "regret": regret}
    columns = ("GPUs", *testbed.PLACEMENTS, "published", "ours", "gap", "regret", "free choice")
    table("13B PPO, thousand tokens/s: published / predicted, and who wins", columns, rows)
    return {"rows": rows, **results}


def transition() -> dict[str, Any]:
    """Training to generation layout: predicted and published seconds."""
    rows, off = [], []
    for (size, gpus), published in testbed.TRANSITION.items():
        costs = testbed.costs_of(size, gpus)
        cut = cuts_of(costs, frozenset({"actor"}), 0, gpus)["actor"].predicted.seconds["reshard"]
        off.append(cut / published - 1)
        rows.append((size, gpus, f"{published:.1f}", f"{cut:.1f}", f"{off[-1]:+.0%}"))
    table("transition of the actor, seconds (predicted)", ("model", "GPUs", "published", "predicted", "off"), rows)
    return {"rows": rows, "mean": mean(map(abs, off))}


def generation() -> dict[str, Any]:
    """Generation by t_g: predicted and published seconds."""
    rows = [
        (size, t_g, seconds, f"{testbed.generation_seconds(size, t_g):.1f}")
        for size, published in testbed.GENERATION.items()
        for t_g, seconds in published.items()
    ]
    table("generation on 16 GPUs, seconds (predicted)", ("model", "t_g", "published", "predicted"), rows)
    return {"rows": rows}


def points() -> dict[str, Any]:
    """Print the prediction for every algorithm, size and cluster of the paper."""
    results: dict[str, Any] = {}
    for recipe in ("PPO", "ReMax", "SafeRLHF"):
        rows = []
        for size in testbed.MODELS:
            found = [best_of(size, gpus, recipe)[0] for gpus in GPU_COUNTS]
            rows.append((size, *(f"{each:,.0f}" if each else "-" for each in found)))
            results |= {f"{recipe} {size} {gpus}": each for gpus, each in zip(GPU_COUNTS, found, strict=True) if each}
        table(f"{recipe}, tokens/s on HybridFlow's testbed (predicted)", ("model", *map(str, GPU_COUNTS)), rows)
    return results


def costs_at_scale(models: int, nodes: Sequence[int], batch: int) -> PoolCosts:
    """A 70B job of 3, 4 or 5 models, 8 mini-batches a step, on nodes of `EIGHT` types whose network is known."""
    recipe: testbed.Recipe = {3: "ReMax", 4: "PPO", 5: "SafeRLHF"}[models]  # type: ignore[assignment]
    base = testbed.costs_of("70B", 128, recipe, layout=False)
    work = testbed.work_of(recipe, batch)
    load = replace(base.settings[0].load, sequences=batch, work=work, pool_divides=(batch // 8,))
    requests = {role: replace(each, work=work[role]) for role, each in base.requests.items()}
    groups = (
        NodeGroup(gpu=GPUS[gpu], count=count, gpus_per_node=8, node_bandwidth=400e9)
        for gpu, count in zip(plan_defects.EIGHT, nodes, strict=False)
    )
    task = MappingProblem(requests=requests, load=load, software=software_for("GPU", "BF16"), correction=Correction())
    task.simulated.clear()  # what an equal problem left would not be measured
    return task.costs(Cluster(tuple(groups)))


def searched(search: Callable[..., Any], costs: Callable[[], PoolCosts], models: Sequence[str]) -> Any:
    """Simulate and search."""
    return search(costs(), models)


def seconds_of(call: Callable[[], Any]) -> float:
    """The best of three."""
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


def scaling() -> dict[str, Any]:
    """Time and memory of the mapper by GPUs and models, and the pruned search beside the exhaustive one."""
    cases: list[tuple[int, tuple[int, ...], int]] = [(4, (nodes,), EVEN) for nodes in (8, 16, 128)]
    cases += [(3, (128,), EVEN), (5, (128,), EVEN), (4, (128,), ODD), (5, (1024, 1024), EVEN), (5, (256,) * 8, EVEN)]
    rows, results = [], {}
    for models, nodes, batch in cases:
        costs = partial(costs_at_scale, models, nodes, batch)
        names = list(costs().requests)
        taken = seconds_of(partial(searched, pruned, costs, names))
        tracemalloc.start()
        found = pruned(costs(), names)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        slow = ""
        if sum(nodes) <= MOST_EXHAUSTIVE:
            slow = f"{seconds_of(partial(searched, exhaustive, costs, names)):.3f}"
            assert exhaustive(costs(), names)[0].seconds == found[0].seconds
        gpus = 8 * sum(nodes)
        rows.append((models, f"{gpus:,}", len(nodes), f"{batch:,}", f"{taken:.3f}", slow, f"{peak / 1e6:.1f}"))
        name = f"{models} models, {gpus} GPUs, {len(nodes)} types, a batch of {batch}"
        results[name] = {"seconds": taken, "peak_bytes": peak}
    columns = ("models", "GPUs", "GPU types", "batch", "seconds", "exhaustive", "peak MB")
    table("the mapper itself, simulators and search (measured here)", columns, rows)
    return {"rows": rows, **results}


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

    def compared(self, factors: Mapping[Phase, float]) -> list[Compared[Phase]]:
        """Corrected prediction and measurement by phase."""
        corrected = {phase: seconds * factors.get(phase, 1.0) for phase, seconds in self.predicted.items()}
        return compare_phases(corrected, self.rows)


def outcome_of(case: Case) -> Outcome:
    """Run a case for STEPS steps."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_inputs(folder, case.size)
        done = run([job_of(case, folder)], folder) / "step"
        predicted = json.loads((done / "mapping.json").read_text())["predicted"]["phases"]
        rows = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    return Outcome(case, predicted, rows)


def job_of(case: Case, folder: Path) -> dict[str, Any]:
    """The manifest of a case."""
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


def real() -> dict[str, Any]:
    """Runs on CPU slots: how far predictions are off, by phase, once corrected by the first case."""
    first, *_ = found = [outcome_of(case) for case in CASES]
    factors = correction_of(first.predicted, first.rows).factors
    errors: dict[Phase, list[float]] = {phase: [] for phase in PHASES}
    rows = []
    for outcome in found:
        cells = {}
        for phase, predicted, measured, ratio in outcome.compared(factors):
            cells[phase] = f"{predicted:.3f} {measured:.3f} {1 / ratio - 1:+.0%}"
            if outcome is not first:
                errors[phase].append(abs(1 / ratio - 1))
        rows.append((outcome.case.name, *(cells.get(phase, "") for phase in PHASES)))
    table("seconds of a step on CPU slots: predicted, measured (real runs), off", ("case", *PHASES), rows)
    summary = {phase: mean(each) for phase, each in errors.items() if each}
    table("mean error of the cases not calibrated on", ("kind", "off"), [(k, f"{v:.0%}") for k, v in summary.items()])
    return {"factors": factors, "error": summary, "rows": rows}


def defects() -> dict[str, Any]:
    """Print the defects of plans, before and now."""
    found = [*plan_defects.rows()]
    table("defects of plans (predicted)", ("defect", f"before ({plan_defects.BEFORE_ON})", "now"), found)
    return {"rows": found}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "throughput": throughput,
    "placements": placement_study,
    "transition": transition,
    "generation": generation,
    "points": points,
    "public": public_steps,
    "passes": public_passes,
    "scaling": scaling,
    "defects": defects,
    "real": real,
}


def part(name: str) -> str:
    """A part's name as it is. ArgumentTypeError for another."""
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(PARTS)}")
    return name


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", type=part)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    results = {name: PARTS[name]() for name in options.parts or [name for name in PARTS if name != "real"]}
    if options.json:
        options.json.write_text(json.dumps(results, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
