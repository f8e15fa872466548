"""Runs of examples 01 and 12 with one thing wrong, and their records: `python -m tests.trainer.why.plants FOLDER`.

The manifests of all plants are one file, whose first jobs make the models that the others begin with. A record is what
`rlhf why` reads of a job, without times and in gzip.
"""

from __future__ import annotations

import copy
import gzip
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlhf_trainer.report.run_record import Run, read_run
from rlhf_trainer.why.seen import Seen

ROOT = Path(__file__).parents[3]
EXAMPLES, RECORDS = ROOT / "examples", Path(__file__).with_name("records")
TUNING, FIGURES, HEALTHY_FIGURES = (1, 2, 3), (4, 5, 6), tuple(range(4, 14))
"""Seeds by which the rules were tuned, and those of the figures."""
ROWS_OF_A_STEP = 16
"""Kept responses of a step in a record; a run keeps more."""
ROW_FIELDS = ("step", "row", "prompt", "response", "reward", "advantage", "finished", "response_tokens")
OWN = "tests.trainer.why.planted"
HELD_OUT_ROWS = 64
Document = dict[str, Any]
Change = Callable[[Document], None]


class Plant(NamedTuple):
    """One thing that is wrong in a job."""

    cause: str
    """Name of the cause that `why` should find."""
    job: str
    change: Change


def base() -> dict[str, Document]:
    """The jobs of both examples by name, as small as the plants need them."""
    files = (EXAMPLES / "01-helpful-ppo.yaml", EXAMPLES / "12-arithmetic-grpo.yaml")
    jobs = {each["metadata"]["name"]: each for file in files for each in yaml.safe_load_all(file.read_text())}
    for each in jobs.values():
        each["spec"]["resources"] = {"slotsPerNode": 1}
        each["spec"]["evaluation"]["data"]["limit"] = HELD_OUT_ROWS
    ppo, grpo = (jobs[name]["spec"] for name in ("helpful-ppo", "arithmetic-grpo"))
    ppo["training"] |= {"totalSteps": 30, "promptBatchSize": 32, "miniBatchSize": 16}
    ppo["rollout"] = {"keep": 0.25}
    ppo["evaluation"]["everySteps"] = 5
    grpo["training"] |= {"totalSteps": 25, "miniBatchSize": 128}
    grpo["rollout"] = {"samplesPerPrompt": 8, "keep": 0.1}
    grpo["evaluation"]["everySteps"] = 5
    grpo["evaluation"]["verifiers"] = [{"name": "right", "verifier": {"name": "Math", "answerKey": "answer"}}]
    return jobs


def own(name: str) -> Change:
    """Have a job's algorithm be a class of `planted`."""

    def change(spec: Document) -> None:
        given = spec["algorithm"]
        options = {key: value for key, value in given.items() if key != "name"}
        spec["algorithm"] = {"name": "Custom", "entrypoint": f"{OWN}:{name}", "options": options}

    return change


def no_kl(spec: Document) -> None:
    spec["algorithm"]["kl"]["coefficient"] = 0.0
    del spec["models"]["reference"]


def no_end(spec: Document) -> None:
    for role in ("actor", "reference"):
        spec["models"][role]["uri"] = "job://endless-sft"


def fast(spec: Document) -> None:
    optimizer = spec["models"]["actor"]["optimizer"]
    optimizer["learningRate"] = 30 * float(optimizer["learningRate"])


def agreeing(spec: Document) -> None:
    spec["models"]["reward"] = {"entrypoint": f"{OWN}:agrees"}


def beside(function: str, **arguments: float) -> Change:
    """Add a function's score to the reward."""

    def change(spec: Document) -> None:
        given, added = spec["models"]["reward"], {"entrypoint": f"{OWN}:{function}", "arguments": arguments}
        spec["models"]["reward"] = {"sum": [{"name": "helpful", "reward": given}, {"name": "added", "reward": added}]}

    return change


def cut_pays(spec: Document) -> None:
    beside("cut_pays", bonus=4.0)(spec)
    spec["data"]["maxResponseTokens"] = 32
    spec["algorithm"]["rewards"]["missingEndPenalty"] = 0.0


def scaled(spec: Document) -> None:
    rows = spec["training"]["promptBatchSize"] * spec["rollout"]["samplesPerPrompt"]
    spec["models"]["reward"] = {"entrypoint": f"{OWN}:scaled", "arguments": {"rows": rows}}
    for data in (spec["data"]["train"], spec["evaluation"]["data"]):
        data["columns"] = ["answer"]


def one_prompt(spec: Document) -> None:
    spec["data"]["train"] = {"entrypoint": f"{OWN}:one_prompt", "arguments": {"count": 4000}}


PPO, GRPO = "helpful-ppo", "arithmetic-grpo"
HEALTHY = {"healthy-ppo": PPO, "healthy-grpo": GRPO}
PLANTS: dict[str, Plant] = {
    "kl-sign": Plant("RewardedKL", PPO, own("WrongSign")),
    "kl-zero": Plant("NoKLPenalty", PPO, no_kl),
    "no-end": Plant("NoEnd", PPO, no_end),
    "mixed-groups": Plant("MixedGroups", GRPO, own("MixedGroups")),
    "learning-rate": Plant("FastLearning", GRPO, fast),
    "judge-agrees": Plant("ConstantReward", GRPO, agreeing),
    "cut-pays": Plant("CutRewarded", PPO, cut_pays),
    "scale": Plant("RewardScale", GRPO, scaled),
    "stale-weights": Plant("StaleWeights", GRPO, own("StaleGenerator")),
    "one-prompt": Plant("RepeatedPrompt", GRPO, one_prompt),
    "length": Plant("LengthHacking", PPO, beside("length_pays", weight=0.1)),
    "value-head": Plant("UnlearnedValues", PPO, own("UnlearnedValues")),
}
"""What is planted, by the name of its jobs."""
MAKERS = {PPO: ("helpful-sft", "helpful-rm"), GRPO: ("arithmetic-sft",), "no-end": ("endless-sft",)}
"""Jobs that make the models of others."""


def documents(runs: Sequence[tuple[str, int]]) -> Iterator[Document]:
    """Yield the jobs that make models, and then one job for each (plant or healthy job, seed)."""
    jobs = base()
    jobs["endless-sft"] = copy.deepcopy(jobs["helpful-sft"])
    jobs["endless-sft"]["metadata"]["name"] = "endless-sft"
    own("WithoutEnd")(jobs["endless-sft"]["spec"])
    used = {name for plant, _ in runs for name in (plant, HEALTHY.get(plant) or PLANTS[plant].job)}
    yield from (jobs[maker] for name, makers in MAKERS.items() if name in used for maker in makers)
    for plant, seed in runs:
        made = copy.deepcopy(jobs[HEALTHY.get(plant) or PLANTS[plant].job])
        made["metadata"]["name"] = f"{plant}-{seed}"
        made["spec"]["training"]["seed"] = seed
        if plant in PLANTS:
            PLANTS[plant].change(made["spec"])
        yield made


def make(folder: Path, runs: Sequence[tuple[str, int]]) -> None:
    """Run the jobs of the plants into a run folder; those that have succeeded in it are not run again."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "plants.yaml"
    manifest.write_text(yaml.safe_dump_all(documents(runs), sort_keys=False))
    command = [sys.executable, "-m", "rlhf_trainer", "run", str(manifest), "--output", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)


def keep(run: Run, plant: str, seeds: Sequence[int], records: Path = RECORDS) -> None:
    """Write the records of a plant's jobs, a line for each seed; records of other seeds stay."""
    lines = {each["seed"]: json.dumps(each) for each in _lines(plant, records)}
    for seed in seeds:
        job = run[f"{plant}-{seed}"]
        kept = Counter[int]()
        rows = []
        for row in job.rollouts.rows:
            kept[row["step"]] += 1
            if kept[row["step"]] <= ROWS_OF_A_STEP:
                rows.append({name: _short(row[name]) for name in ROW_FIELDS if name in row})
        measured = [
            {name: _short(value) for name, value in each.items() if is_of_the_job(name)} for each in job.records
        ]
        lines[seed] = json.dumps({"seed": seed, "spec": job.spec, "records": measured, "rows": rows})
    records.mkdir(exist_ok=True)
    with gzip.GzipFile(records / f"{plant}.jsonl.gz", "wb", compresslevel=9, mtime=0) as file:
        file.write(("\n".join(lines[seed] for seed in sorted(lines)) + "\n").encode())


def read(plant: str) -> dict[int, Seen]:
    """What `why` sees of the runs of a plant or of a healthy job, by seed."""
    return {each["seed"]: Seen(each["spec"], each["records"], each["rows"]) for each in _lines(plant, RECORDS)}


def _lines(plant: str, records: Path) -> list[Document]:
    file = records / f"{plant}.jsonl.gz"
    return [json.loads(line) for line in gzip.open(file, "rt", encoding="utf-8")] if file.exists() else []


def is_of_the_job(name: str) -> bool:
    """Whether a metric measures the job, not the machine."""
    return not name.startswith(
        ("time/", "busy/", "idle", "memory", "bytes/", "flops/", "tokens_per", "kv_cache", "cause/")
    )


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    """Make the runs that have no record yet, or all of the plants that are named, and their records."""
    folder, *names = sys.argv[1:]
    plants = names or [*HEALTHY, *PLANTS]
    seeds = {name: [*TUNING, *(HEALTHY_FIGURES if name in HEALTHY else FIGURES)] for name in plants}
    if not names:
        seeds = {name: [seed for seed in of if seed not in read(name)] for name, of in seeds.items()}
    make(Path(folder), [(name, seed) for name in plants for seed in seeds[name]])
    run = read_run(Path(folder))
    for name in plants:
        keep(run, name, seeds[name])


if __name__ == "__main__":
    main()
