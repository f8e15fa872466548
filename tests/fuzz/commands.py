"""Files that users write, damaged, and the commands that read them: an answer, or sentences and the right exit code."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from rlhf_api import kubectl_yaml
from rlhf_api.exit_codes import ExitCode
from rlhf_api.problems import SpecError
from rlhf_operator.settings import Settings
from rlhf_trainer.commands.cli import app
from rlhf_trainer.errors import TrainerError
from rlhf_trainer.pods.read_shapes import answer
from rlhf_trainer.run.resume import unfinished
from rlhf_trainer.run_folder.folder import load_with_finished
from tests.api.cases import RIGHT
from tests.fuzz.damage import NUMBERS, as_json, as_yaml, damaged, encoded, garbled, torn
from tests.repo.tree import ROOT
from tests.trainer.report.conftest import PPO, SFT, finish, ppo_record, run_job, sample

Case = Callable[[random.Random], str]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
MISTAKES = (ExitCode.SPEC, ExitCode.DATA, ExitCode.ENVIRONMENT)
LONGEST = 20_000
"""Characters of a sentence, which may name a field of thousands."""
MODEL = ROOT / "examples" / "rlhf_examples" / "helpful" / "model"
SHAPES: tuple[dict[str, Any], ...] = (
    {"name": "llama-2-7b"},
    {"hiddenSize": 64, "numHiddenLayers": 2, "numAttentionHeads": 4, "intermediateSize": 128, "vocabSize": 512},
)
INVENTORY = """
gpus:
- {name: mine, memoryGB: 80, bf16Tflops: 300, fp32Tflops: 20, memoryGBps: 2000, linkGBps: 600, hostGBps: 32}
nodes:
- {gpu: a100-80g, count: 2, gpusPerNode: 8, intraNodeGBps: 600, interNodeGbps: 200, hostMemoryGB: 1000}
- {gpu: mine, count: 1, gpusPerNode: 4}
"""
SETTINGS = """
namespaces: [team]
trainerImage: trainer:1
gpus:
- {product: P, name: p, memoryGB: 80, bf16Tflops: 300, fp32Tflops: 20, memoryGBps: 9, linkGBps: 6, hostGBps: 3}
nodeGroups:
- {matchLabels: {pool: a}, intraNodeGBps: 600, interNodeGbps: 200, pricePerGpuHour: 2}
worker: {cpu: "2", memory: 4Gi}
storage: {size: 1Gi, storageClassName: fast, accessMode: ReadWriteOnce}
statusIntervalSeconds: 5
"""


def told(*arguments: object) -> str:
    """What a command did, in a word or two; AssertionError where it did not end with an answer or with sentences."""
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    lines = done.stderr.rstrip("\n").split("\n") if done.stderr else []
    if done.exit_code != ExitCode.OK:
        assert done.exit_code in MISTAKES, done.stderr
        assert lines, "it says nothing"
        assert all(line.startswith("error: ") for line in lines), done.stderr
    assert max(map(len, lines), default=0) < LONGEST, done.stderr
    return f"{arguments[0]}: {ExitCode(done.exit_code).name}"


def ended(work: Callable[[], object], beginning: str = "") -> str:
    """How work ended; AssertionError where that was not with sentences about what `beginning` names."""
    mistake: SpecError | TrainerError | None = None
    try:
        work()
    except (SpecError, TrainerError) as error:
        mistake = error
    if mistake is None:
        return "OK"
    assert mistake.exit_code in MISTAKES, mistake
    assert all(line.startswith(beginning) and 0 < len(line) < LONGEST for line in str(mistake).split("\n")), mistake
    return ExitCode(mistake.exit_code).name


def right_manifests() -> list[str]:
    """The examples, each without the others, and a small one of each kind of field."""
    whole, *others = (path.read_text() for path in EXAMPLES)
    small = (kubectl_yaml.write(case.document()) for case in RIGHT.values())
    return [whole, *(text.replace("job://", "hf://a/") for text in others), *small]


def manifests(folder: Path) -> Case:
    """`rlhf validate` of right ones, damaged as documents and as texts, with and without --set."""
    texts, file = right_manifests(), folder / "job.yaml"

    def case(dice: random.Random) -> str:
        text, documents = dice.choice(texts), dice.random() < 0.7
        changed = as_yaml(dice, damaged(dice, kubectl_yaml.read(text, ""))) if documents else garbled(dice, text)
        file.write_bytes(encoded(changed))
        change = [f"--set={garbled(dice, 'training.totalSteps=3')}"] * (dice.random() < 0.2)
        return told("validate", file, "--output", folder / "none", *change)

    return case


def plans(folder: Path) -> Case:
    """`rlhf plan` of damaged jobs and inventories, which the mapper has to answer."""
    file, inventory = folder / "job.yaml", folder / "inventory.yaml"
    texts, nodes = [path.read_text() for path in EXAMPLES], kubectl_yaml.read(INVENTORY, "")

    def case(dice: random.Random) -> str:
        *_, document = kubectl_yaml.read(dice.choice(texts), "")
        for model in document["spec"]["models"].values():
            if "entrypoint" not in model:
                model |= {"uri": "hf://a/b", "shape": dice.choice(SHAPES)}
        document["spec"] = _with_other_numbers(dice, document["spec"])
        file.write_bytes(encoded(kubectl_yaml.write(document)))
        inventory.write_bytes(encoded(as_yaml(dice, damaged(dice, nodes)) if dice.random() < 0.5 else INVENTORY))
        lengths = garbled(dice, "lognormal(40,60)") if dice.random() < 0.1 else "fixed(20)"
        options = ["--inventory", inventory, f"--response-tokens={lengths}"]
        return told("plan", file, "--output", folder / "none", *options)

    return case


def _with_other_numbers(dice: random.Random, document: Any) -> Any:
    """A document with numbers of a size that may be right, so that it gets as far as the mapper."""
    text = as_json(document)
    numbers = ["0", "1", "2", "3", "7", "8", "64", "1000000", *map(str, NUMBERS[:4])]
    parts = text.split("1")
    for _ in range(dice.choice((0, 1, 3))):
        parts[dice.randrange(len(parts))] += dice.choice(numbers)
    try:
        return json.loads("1".join(parts))
    except ValueError:
        return document


def settings(folder: Path) -> Case:
    """The operator's settings, and the config.json of a model, which a pod tells the operator."""
    file, model = folder / "settings.yaml", folder / "model"
    model.mkdir()
    right, config = kubectl_yaml.read(SETTINGS, ""), json.loads((MODEL / "config.json").read_text())

    def case(dice: random.Random) -> str:
        if dice.random() < 0.5:
            file.write_bytes(encoded(as_yaml(dice, damaged(dice, right))))
            return f"settings: {ended(lambda: Settings.read(file), str(file))}"
        data = encoded(as_json(damaged(dice, config)))
        (model / "config.json").write_bytes(torn(dice, data) if dice.random() < 0.3 else data)
        said = answer(f"file://{model}", None)
        json.dumps(said, ensure_ascii=False).encode()
        return f"config.json: {next(iter(said))}"

    return case


def run_folders(folder: Path) -> Case:
    """Folders of runs whose files were cut off or edited, and what reads them."""
    whole, output = folder / "whole", folder / "run"
    _write_run(whole)
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())

    def case(dice: random.Random) -> str:
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(whole, output)
        for name in dice.sample(files, k=dice.choice((1, 1, 3))):
            _damage_file(dice, output / name)
        if dice.random() < 0.05:
            return told("report", output)
        if dice.random() < 0.5:
            return _resumed(output)
        return told(*dice.choice((("checkpoints", output), ("validate", EXAMPLES[0], "--output", output))))

    return case


def _write_run(output: Path) -> None:
    """A run of which a job has finished, and the next has begun and has checkpoints."""
    first = run_job(output, SFT, [{"step": step, "loss/sft": 1 / step, "time/step": 0.1} for step in (1, 2, 3)])
    first.made.mkdir()
    (first.made / "config.json").write_text("{}")
    finish(output, first, loss=0.4)
    second = run_job(output, PPO, map(ppo_record, (1, 2, 3)))
    second.write_held_out([sample(1), sample(2)])
    for step in (2, 3):
        uri = second.checkpoints.begin(step)
        (Path(uri) / "actor").mkdir()
        (Path(uri) / "actor" / "shard-0.safetensors").write_bytes(bytes(100))
        state = json.dumps({"step": step, "rows": 480, "counters": {}})
        second.checkpoints.complete(uri, {"state.json": state, **second.texts_for_checkpoint(up_to=step)})


def _damage_file(dice: random.Random, file: Path) -> None:
    data, kind = file.read_bytes(), dice.random()
    if kind < 0.1:
        file.unlink()
    elif kind < 0.4 or file.suffix not in (".json", ".jsonl", ".yaml"):
        file.write_bytes(torn(dice, data))
    elif file.suffix == ".yaml":
        file.write_bytes(encoded(as_yaml(dice, damaged(dice, kubectl_yaml.read(data.decode(), "")))))
    else:
        lines = data.decode().splitlines() if file.suffix == ".jsonl" else [data.decode()]
        chosen = dice.randrange(len(lines))
        lines[chosen] = as_json(damaged(dice, json.loads(lines[chosen])))
        file.write_bytes(encoded("\n".join(lines)))


def _resumed(output: Path) -> str:
    """What `rlhf run` asks of a folder before it starts anything."""

    return f"run: {ended(lambda: unfinished(load_with_finished(output, EXAMPLES[0], []), output))}"
