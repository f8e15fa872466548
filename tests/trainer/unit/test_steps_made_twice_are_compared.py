"""`rlhf reproduce`: what run.json holds, how two runs of the same steps are compared, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner, Result

from rlhf_trainer.checkpoint import STATE
from rlhf_trainer.commands.cli import app
from rlhf_trainer.errors import Paused
from rlhf_trainer.run import reproduce
from rlhf_trainer.run.inputs import files_below, hash_file, hashed, sources_of
from rlhf_trainer.run.resume import from_the_start
from rlhf_trainer.run_folder.evidence import RUN, Document, Entry, as_text, parsed
from rlhf_trainer.run_folder.folder import METRICS, RANKS, JobFolder
from rlhf_trainer.run_folder.repeated import compare, first_ranks
from rlhf_trainer.run_folder.step_metrics import repeats
from rlhf_trainer.telemetry import CONTROLLER, Report, Span, fingerprints
from tests.trainer import jobs
from tests.trainer.tiny import save_tiny

SPEC: dict[str, Any] = {
    "algorithm": {"name": "SFT"},
    "models": {"actor": {"uri": "file://model"}},
    "data": {"train": {"uri": "file://rows.jsonl", "promptKey": "prompt", "responseKey": "chosen"}},
    "resources": {"slotsPerNode": 1},
    "training": {"batchSize": 2, "totalSteps": 9},
}
ROWS = '{"prompt": "a", "chosen": "b"}\n{"prompt": "c", "chosen": "d"}\n'


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, rows, and a run of two steps with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("first")
    save_tiny(folder / "model", seed=1)
    (folder / "rows.jsonl").write_text(ROWS)
    job = jobs.job(folder, "sft", SPEC)
    kept = JobFolder(folder / "run", job)
    start = from_the_start([job], folder / "run")["sft"]
    kept.begin(None, inputs={}, evidence=start.evidence)
    end_hashing = start.begin_hashing(kept)
    for step in (1, 2):
        ranks = fingerprints(
            [measured("actor.update_actor", rank, loss=float(step + rank)) for rank in (0, 1)], repeats
        )
        record = {"step": step, "loss/sft": 0.5 * step, "time/step": 0.1}
        kept.record(record, total_steps=9, stage="SFT", ranks=ranks)
        saved = kept.checkpoints.complete(kept.checkpoints.begin(step), {STATE: "{}"})
        kept.record_checkpoint(saved, {"actor/0": f"0000000{step}", "actor/1": "00000009"})
    end_hashing(2)
    return folder


@pytest.fixture
def run(first: Path, tmp_path: Path) -> Path:
    """A copy of the run, whose job reads the files of the first folder."""
    return shutil.copytree(first / "run", tmp_path / "run")


def measured(call: str, rank: int, **values: float) -> Report:
    """The report of a call on a rank."""
    means = {f"loss/{name}": (value, 1.0) for name, value in values.items()}
    return Report(means=means, sums={"bytes/reshard": rank * 7.0}, spans=[Span("update", call, rank, 0.0, 1.0, "all")])


def change(file: Path, **changes: object) -> None:
    """Change the last line of a .jsonl file."""
    *lines, last = file.read_text().splitlines()
    file.write_text("".join(f"{line}\n" for line in (*lines, json.dumps({**json.loads(last), **changes}))))


def command(run: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["reproduce", str(run), *options])


def test_a_run_has_the_hashes_of_what_it_read(first: Path) -> None:
    document = parsed((first / "run" / "sft" / RUN).read_bytes())
    data = next(entry for entry in document["read"] if entry["name"] == "spec.data.train")
    assert (data["uri"], data["sha256"]) == ((first / "rows.jsonl").as_uri(), sha256(ROWS.encode()).hexdigest())
    model = next(entry for entry in document["read"] if entry["name"] == "spec.models.actor")
    names = sorted(file.name for file in (first / "model").iterdir())
    printed = subprocess.check_output(["sha256sum", *names], cwd=first / "model")
    assert model["sha256"] == sha256(printed).hexdigest()
    assert list(model["files"]) == names
    assert [(entry["name"], entry["step"]) for entry in document["made"]] == [
        ("checkpoint", 1),
        ("checkpoint", 2),
        ("model", 2),
    ]
    (attempt,) = document["attempts"]
    assert attempt["packages"].keys() >= {"torch", "transformers"}
    assert "run.json lacks hashes of files of model" in (first / "run" / "sft" / "events.log").read_text()


def test_a_file_of_the_hubs_cache_is_not_read(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("0a" * 32)
    blob.parent.mkdir()
    blob.write_text("never read")
    (tmp_path / "model.safetensors").symlink_to(blob)
    assert hash_file(tmp_path / "model.safetensors") == blob.name
    (tmp_path / blob.name).write_text("named so by a user")
    assert hash_file(tmp_path / blob.name) == sha256(b"named so by a user").hexdigest()
    assert hash_file(tmp_path / "gone") == ""


def test_own_code_has_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "mine_rows.py"
    code.write_text("def rows():\n    return []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = {**SPEC, "data": {"train": {"entrypoint": "mine_rows:rows"}}}

    def revision() -> str:
        (entry,) = (source for source in sources_of(jobs.job(tmp_path, "sft", spec), tmp_path) if source[1])
        return str(hashed(entry).get("revision", ""))

    def git(*words: str) -> str:
        named = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.check_output(["git", *named, *words], cwd=tmp_path, text=True).strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    assert revision() == commit
    code.write_text("def rows():\n    return [1]\n")
    assert revision() == f"{commit}-dirty"
    git("rm", "-q", "--cached", code.name)
    (tmp_path / ".gitignore").write_text("*\n")
    git("commit", "-qm", "two")
    assert revision() == f"{git('rev-parse', 'HEAD')}-dirty", "the commit has no such file"


def test_a_file_name_may_have_any_bytes(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"a\xff.jsonl")).write_text(ROWS)
    entry = hashed((Entry(name="spec.data.train", kind="data", uri=""), files_below(tmp_path, "data")))
    assert [*entry["files"]] == ["a\\xff.jsonl"]
    assert as_text(Document(attempts=[], read=[entry], made=[])).encode()


def test_times_and_fetched_bytes_are_not_compared(first: Path, run: Path) -> None:
    change(run / "sft" / METRICS, **{"time/step": 9.0})
    found, counts = compare(first / "run" / "sft", run / "sft", [1, 2])
    assert (found, counts) == ("", {"metrics": 4, "fields of responses": 0, "checksums of weights": 4})


def first_difference(first: Path, run: Path) -> str:
    return compare(first / "run" / "sft", run / "sft", [1, 2])[0]


def test_the_first_step_field_call_and_rank_are_named(first: Path, run: Path) -> None:
    reports = [measured("actor.update_actor", 0, loss=2.0), measured("actor.update_actor", 1, loss=3.5)]
    change(run / "sft" / RANKS, calls=fingerprints(reports, repeats))
    change(run / "sft" / METRICS, **{"loss/sft": 1.25})
    where = ", first in actor.update_actor on rank all/1"
    assert first_difference(first, run) == f"step 2: loss/sft is 1.25, was 1.0{where}"
    (run / "sft" / METRICS).write_text("")
    assert first_difference(first, run).startswith("step 1: step is missing, was 1 (1 more values of this step differ)")


def test_weights_of_a_rank_are_named(first: Path, run: Path) -> None:
    file = run / "sft" / RUN
    file.write_text(file.read_text().replace('"actor/0": "00000002"', '"actor/0": "0000000f"'))
    assert first_difference(first, run) == "step 2: weights of actor/0 is '0000000f', was '00000002'"
    document = parsed((run / "sft" / RUN).read_bytes())
    document["made"] = [each for each in document["made"] if each["step"] != 2]
    file.write_text(as_text(document))
    assert first_difference(first, run) == "", "only one of them has a checkpoint of step 2"


def test_a_response_is_named_if_no_metric_differs(first: Path, tmp_path: Path) -> None:
    one, other = (shutil.copytree(first / "run", tmp_path / name) / "sft" for name in ("a", "b"))
    row = {"step": 2, "row": 5, "prompt": "p", "reward": 1.0}
    for folder, response in zip((one, other), ("yes", "no"), strict=True):
        (folder / "rollouts.jsonl").write_text(json.dumps({**row, "response": response}) + "\n")
    assert compare(one, other, [1, 2])[0] == "step 2: row 5 of rollouts.jsonl: response is 'no', was 'yes'"
    change(other / METRICS, **{"loss/sft": 1.25})
    assert compare(one, other, [1, 2])[0] == "step 2: loss/sft is 1.25, was 1.0 (1 more values of this step differ)"


def test_the_first_call_that_differs_is_the_cause() -> None:
    def of(reward: float) -> dict[str, Any]:
        begun = [measured("actor.generate_sequences: fetch", rank, length=4.0) for rank in (0, 1)]
        scored = [measured("reward.compute_reward", rank, reward=reward * rank) for rank in (0, 1)]
        updated = [measured("actor.update_actor", rank, policy=reward) for rank in (0, 1)]
        idle = Report(sums={"tokens": reward}, spans=[Span(CONTROLLER, "wait", 0, 0.0, 1.0)])
        return fingerprints([*begun, *scored, *updated, idle], repeats)

    assert first_ranks(of(1.0), of(2.0)) == ", first in reward.compute_reward on rank all/1"
    assert first_ranks(of(1.0), of(1.0)) == ""
    assert [*of(1.0)] == ["actor.generate_sequences", "reward.compute_reward", "actor.update_actor"]


@pytest.fixture
def perfect(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the run of the steps: what the first time left."""

    def again(_text: str, *, output: Path, starts: dict[str, Any], **_: object) -> None:
        assert starts["sft"].last_step == 2
        shutil.copytree(run / "sft", output / "sft")
        raise Paused("all steps to repeat are made")

    monkeypatch.setattr(reproduce, "run_file", again)


@pytest.mark.usefixtures("perfect")
def test_equal_steps_end_with_zero_and_leave_the_run_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    done = command(run)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"sft: makes steps 1 to 2 of {run} again in {run}-reproduced",
        "sft: steps 1 to 2 are equal: 4 metrics, 4 checksums of weights",
    ]
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == before
    monkeypatch.chdir(run)
    again = command(Path())
    assert (again.exit_code, again.stderr) == (
        2, f"error: {run}-reproduced: is there already; move it away\n"
    )  # fmt: skip


def _row(first: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:  # noqa: ARG001
    rows = run.parent / "changed.jsonl"
    rows.write_text(ROWS.replace('"d"', '"e"'))
    return (f"--set=data.train.uri={rows.as_uri()}",)


def _edited(first: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:  # noqa: ARG001
    file = run / "sft" / RUN
    file.write_text(file.read_text().replace(sha256(ROWS.encode()).hexdigest(), "0" * 64))
    return ()


def _moved(first: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:  # noqa: ARG001
    shutil.copy(first / "rows.jsonl", run.parent / "rows.jsonl")
    return (f"--set=data.train.uri={(run.parent / 'rows.jsonl').as_uri()}",)


def _seed(*_: object) -> tuple[str, ...]:
    return ("--set=training.seed=7",)


def _version(first: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:  # noqa: ARG001
    file = run / "sft" / RUN
    document = parsed(file.read_bytes())
    document["attempts"][0]["packages"]["torch"] = "1.0"
    document["attempts"][0].pop("threads", None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    file.write_text(json.dumps(document))
    return ()


def _layout(first: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:  # noqa: ARG001
    pool = {"gpus": 2, "gpu": "cpu-slot", "models": ["actor"]}
    placed = {"pools": [pool], "models": {"actor": {"p": 1, "t": 1, "d": 2}}}
    (run / "sft" / "mapping.json").write_text(json.dumps(placed))
    return ()


MOVED = "spec.data.train.uri is file://{tmp}/changed.jsonl, was file://{first}/rows.jsonl"
DIFFERENT: dict[str, tuple[Callable[..., tuple[str, ...]], str]] = {
    "a row": (_row, f"sft: differs: {MOVED}; line 2 is the first that differs"),
    "a file": (_edited, "sft: differs: spec.data.train: rows.jsonl is not what it was"),
    "a seed": (_seed, "sft: differs: spec.training.seed is 7, was 0"),
    "a version": (_version, "sft: differs: packages.torch is "),
    "a layout": (_layout, "sft: differs: the layout is 1 x cpu-slot: actor 1-1-1, was 2 x cpu-slot: actor 1-1-2"),
}


@pytest.mark.usefixtures("perfect")
@pytest.mark.parametrize(("make", "sentence"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_is_said_first_and_is_no_success(
    first: Path, run: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., tuple[str, ...]], sentence: str
) -> None:
    done = command(run, *make(first, run, monkeypatch))
    (told,) = (line for line in done.stdout.splitlines() if "differs: " in line)
    assert told.startswith(sentence.format(first=first, tmp=run.parent)), done.output
    assert done.exit_code == 2
    assert done.stderr.startswith("error: sft: inputs differ (")


@pytest.mark.usefixtures("perfect")
def test_the_same_file_in_another_place_is_no_difference(
    first: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = command(run, *_moved(first, run, monkeypatch))
    assert done.exit_code == 0, done.output


@pytest.mark.usefixtures("perfect")
def test_inputs_without_hashes_are_named(first: Path, run: Path) -> None:
    evidence = from_the_start([jobs.job(first, "sft", SPEC)], run)["sft"].evidence
    document = {**parsed((run / "sft" / RUN).read_bytes()), "read": evidence["read"]}
    (run / "sft" / RUN).write_text(as_text(cast("Document", document)))
    done = command(run)
    lacks = "sft: run.json lacks hashes of spec.models.actor, spec.data.train, so these inputs may differ"
    assert (done.exit_code, done.stdout.splitlines()[1]) == (0, lacks)


@pytest.mark.usefixtures("perfect")
def test_steps_of_an_earlier_version_name_no_machine(run: Path) -> None:
    """Its first attempt wrote no run.json, and a later attempt of this version went on after step 1."""
    document = parsed((run / "sft" / RUN).read_bytes())
    document["attempts"][0]["after"] = 1
    (run / "sft" / RUN).write_text(as_text(document))
    done = command(run)
    differs = [line for line in done.stdout.splitlines() if "differs" in line]
    assert (done.exit_code, differs) == (2, ["sft: differs: run.json does not say on what these steps ran"])


def _nothing(_: Path) -> None:
    """Leave the run as it is."""


def _read_another(run: Path) -> None:
    file = run / "sft" / "job.yaml"
    file.write_text(re.sub(r"uri: file://\S*model", "uri: job://before", file.read_text()))


REFUSED: dict[str, tuple[Callable[[Path], object], tuple[str, ...], int, str]] = {
    "no run": (shutil.rmtree, (), 2, "{run}: is no run folder: no job has begun in it"),
    "no job": (_nothing, ("--job=dpo",), 2, "--job: no job dpo has begun in {run}; there are sft"),
    "no checkpoint": (
        _nothing,
        ("--from=7",),
        2,
        "--from 7: sft has no whole checkpoint of that step; there are: 1, 2",
    ),
    "nothing begun": (lambda run: (run / "sft" / METRICS).unlink(), (), 2, "{run}/sft: no step has ended"),
    "no input": (_read_another, (), 3, "sft: reads the output of before, which is not in {run} any more"),
    "no step": (_nothing, ("--from=2",), 2, "{run}/sft: no step after 2 has ended"),
    "no record": (lambda run: (run / "sft" / RUN).unlink(), (), 2, "{run}/sft/run.json: is not there"),
    "damaged": (lambda run: (run / "sft" / RUN).write_text("{"), (), 4, "{run}/sft/run.json: is not as a run left it"),
    "damaged steps": (
        lambda run: (run / "sft" / METRICS).write_text("{\n"),
        (),
        4,
        "{run}/sft/metrics.jsonl: is not as a run left it",
    ),
    "no data": (
        _nothing,
        ("--set=data.train.uri=file:///gone.jsonl",),
        3,
        "sft: spec.data.train: file:///gone.jsonl is",
    ),
    "no model": (_nothing, ("--set=models.actor.uri=file:///gone",), 3, "sft: spec.models.actor: file:///gone is not"),
    "no such field": (_nothing, ("--set=training.sed=1",), 2, "sft: spec.training.sed: "),
}


@pytest.mark.parametrize(("damage", "options", "code", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_there_is_one_sentence(
    run: Path, damage: Callable[[Path], object], options: tuple[str, ...], code: int, sentence: str
) -> None:
    damage(run)
    done = command(run, *options)
    assert done.exit_code == code, done.output
    assert done.stderr.startswith(f"error: {sentence.format(run=run)}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert not Path(f"{run}-reproduced").exists()
