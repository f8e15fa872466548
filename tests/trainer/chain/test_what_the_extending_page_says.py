"""The files of docs/extending.md run as the page says, outside of this package."""

from __future__ import annotations

import inspect
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rlhf
import rlhf.workers
from rlhf_trainer.commands.cli import PROJECT, app
from tests.patience import PATIENCE_SECONDS
from tests.trainer.chain.conftest import ROOT, records
from tests.trainer.chain.conftest import rlhf as command

PAGE = (ROOT / "docs" / "extending.md").read_text()
OWN = [PROJECT, ROOT / "examples" / "own"]
FILES = {path.name: path.read_text() for folder in OWN for path in sorted(folder.glob("*.*"))}
SHORT = (
    *("--set=sft:training.totalSteps=3", "--set=better-half:training.promptBatchSize=4"),
    *("--set=better-half:training.miniBatchSize=8", "--set=resources.slotsPerNode=2"),
)


RUN = """import sys, rlhf
run = rlhf.run(sys.argv[1], output=sys.argv[2], sets=sys.argv[3:])
print(run["better-half"].metrics().T.to_string())"""
CURIOUS = "--set=better-half:algorithm={name: Custom, entrypoint: 'curious:Curious', options: {curiosity: 0.2}}"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `rlhf init` writes, with the further files of the page."""
    folder = tmp_path_factory.mktemp("projects") / "project"
    done = CliRunner().invoke(app, ["init", str(folder)])
    assert (done.exit_code, len(done.stdout.splitlines())) == (0, 1 + len([*PROJECT.glob("*.*")]))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def test_the_test_of_a_new_project_passes(project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_project.py"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


def test_a_project_is_written_into_no_folder_that_is_there(project: Path) -> None:
    done = CliRunner().invoke(app, ["init", str(project)])
    assert (done.exit_code, done.stderr) == (2, f"error: {project}: is there already; name a new folder\n")


@pytest.mark.slow
def test_an_own_algorithm_learns_and_goes_on(project: Path) -> None:
    """The first run is one from Python, the second one of the command line."""
    output = project / "curious"
    steps = "--set=better-half:training.totalSteps="
    sets = [each.removeprefix("--set=") for each in (CURIOUS, *SHORT, f"{steps}2")]
    begun = subprocess.run(
        [sys.executable, "-c", RUN, project / "job.yaml", output, *sets],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert begun.returncode == 0, begun.stderr
    assert "reward/mean" in begun.stdout
    learnt = records(output / "better-half")
    assert [each["step"] for each in learnt] == [1, 2]
    assert all(each["grad_norm/policy"] > 0 for each in learnt)
    kept = output / "better-half" / "algorithm-from-000001.py"
    assert kept.read_text() == FILES["curious.py"]

    (project / "curious.py").write_text(FILES["curious.py"].replace("Rewards surprise.", "None."))
    gone_on = command("run", project / "job.yaml", f"--output={output}", CURIOUS, *SHORT, f"{steps}3")
    assert gone_on.returncode == 0, gone_on.stderr
    assert "spec.algorithm.entrypoint: curious.py is not what it was at the checkpoint" in gone_on.stdout
    assert [each["step"] for each in records(output / "better-half")] == [1, 2, 3]
    assert '"""None."""' in (output / "better-half" / "algorithm-from-000003.py").read_text()


REPLAY = "--set=better-half:algorithm={name: Custom, entrypoint: 'replay:Replay', options: {kl: {coefficient: 0}}}"


@pytest.mark.slow
def test_a_replay_buffer_is_the_same_after_a_resume(project: Path) -> None:
    """Of three batches, on two ranks; the generator may also be an update ahead."""
    weights, steps = [], "--set=better-half:training.totalSteps="
    for name, lengths in (("whole", (5,)), ("resumed", (2, 5))):
        for length in lengths:
            output = project / f"replay-{name}"
            done = command("run", project / "job.yaml", f"--output={output}", REPLAY, *SHORT, f"{steps}{length}")
            assert done.returncode == 0, done.stderr
            assert not re.search("StaleWeights|learns from the responses of|off 1 by|disagree", done.stdout)
        assert [each["staleness"] for each in records(output / "better-half")] == [0, 1, 2, 2, 2]
        weights.append((output / "better-half" / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    ahead = ["--set=better-half:rollout.maxStaleness=1", f"{steps}5"]
    done = command("run", project / "job.yaml", f"--output={project / 'ahead'}", REPLAY, *SHORT, *ahead)
    assert done.returncode == 0, done.stderr
    assert max(each["staleness"] for each in records(project / "ahead" / "better-half")) == 3


POINTS = (
    *("--set=training.totalSteps=3", "--set=resources.slotsPerNode=2"),
    "--set=data.train={entrypoint: 'sums:rows', arguments: {count: 20, largest: 9}}",
    "--set=data.order={entrypoint: 'easier:order'}",
    "--set=models.actor.optimizer.schedule=triangle:factor",
)


@pytest.mark.slow
def test_own_rows_order_and_rate_are_told_to_a_callback(project: Path) -> None:
    output, notes, manifest = project / "points", project / "points.txt", project / "sft.yaml"
    manifest.write_text(FILES["job.yaml"].partition("---")[0])
    told = f"--set=outputs.callbacks=[{{entrypoint: 'notes:Notes', arguments: {{file: {notes}, metric: loss/sft}}}}]"
    begun = command("run", manifest, f"--output={output}", *POINTS, told)
    assert begun.returncode == 0, begun.stderr
    lines = [f"step {each['step']:.0f}: {each['loss/sft']:.3f}" for each in records(output / "sft")]
    assert notes.read_text().splitlines() == [*lines, "Succeeded, 3 steps"]


GRPO = "--set=better-half:algorithm={name: GRPO, kl: {coefficient: 0}}"


@pytest.mark.slow
def test_an_own_environment_answers_and_rewards(project: Path) -> None:
    output, asked = project / "words", "{entrypoint: 'words:Words', arguments: {wanted: 2}}"
    changes = ("models.reward=", f"rollout.environment={asked}", "rollout.keep=1.0", "training.totalSteps=2")
    sets = [GRPO, *SHORT, *(f"--set=better-half:{change}" for change in changes)]
    done = command("run", project / "job.yaml", f"--output={output}", *sets)
    assert done.returncode == 0, done.stderr
    steps = records(output / "better-half")
    assert all(each["episodes/failed"] == 0 and each["episodes/turns"] >= 1 for each in steps)
    kept = [json.loads(line) for line in (output / "better-half" / "rollouts.jsonl").read_text().splitlines()]
    turns = [row["turns"] for row in kept]
    assert {turn["text"] for each in turns for turn in each if not turn["written"]} <= {" More. ", " Fewer. "}
    assert [row["reward"] for row in kept] == pytest.approx([sum(turn["reward"] for turn in each) for each in turns])


def test_the_page_shows_or_names_each_file() -> None:
    shown = dict(re.findall(r'^```\w+ title="(\S+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL))
    assert shown.keys() == {"better_half.py", "from_python.py"}
    assert shown == {name: FILES[name] for name in shown}
    assert [name for name in FILES if name not in PAGE] == ["test_project.py"]


def test_the_worker_on_the_page_is_in_its_file() -> None:
    (shown,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown in FILES["curious.py"]


@pytest.mark.slow
def test_the_script_runs_from_python(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "from_python.py"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert "reward/mean" in done.stdout
    document = json.loads((project / "run" / "summary.json").read_text())
    assert document["better-half"]["steps"] == 2


@pytest.mark.slow
def test_the_graph_has_the_calls_of_own_workers(project: Path) -> None:
    done = command("plan", project / "job.yaml", "better-half", "--graph", CURIOUS)
    assert done.returncode == 0, done.stderr
    calls = re.findall(r"^\d+ +\d+ +\S+ +(\S+\.\S+)", done.stdout, re.MULTILINE)
    own = ["actor.compute_surprise", "reference.compute_log_prob", "reward.compute_reward", "bonus.add_bonus"]
    assert calls[3:7] == own


def test_an_installed_package_names_its_algorithms(project: Path, tmp_path: Path) -> None:
    shutil.copy(project / "better_half.py", tmp_path)
    about = tmp_path / "better_half-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: better-half\nVersion: 1\n")
    section = re.search(r'"(rlhf\.\w+)"\]\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)
    assert section
    (about / "entry_points.txt").write_text(f"[{section[1]}]\n" + section[2].replace('"', ""))
    manifest = tmp_path / "elsewhere" / "job.yaml"
    manifest.parent.mkdir()
    manifest.write_text(FILES["job.yaml"].replace('"better_half:BetterHalf"', "BetterHalf"))
    script = "import rlhf, sys; print(type(rlhf.load(sys.argv[1])[-1].spec.algorithm).__module__)"
    found = {
        path: subprocess.run(
            [sys.executable, "-c", script, str(manifest)], env={"PYTHONPATH": path}, capture_output=True, text=True,
            check=False,
        )
        for path in (str(tmp_path), "")
    }  # fmt: skip
    assert found[str(tmp_path)].stdout == "better_half\n"
    assert "better-half: spec.algorithm.entrypoint: no package has BetterHalf in rlhf.algorithms; there is none" in (
        found[""].stderr
    )


PYTHON = ROOT / "examples" / "python"


def script(name: str, *arguments: object) -> str:
    """What a script of examples/python prints."""
    command = [sys.executable, str(PYTHON / name), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_folder_is_read_into_pandas(chain: tuple[Path, str]) -> None:
    shown = script("read_run.py", chain[0])
    assert re.search(r"helpful-ppo \(PPO, Succeeded\): \d+ steps\n +.*reward/mean", shown)
    metrics = rlhf.load_run(chain[0])["helpful-ppo"].metrics()
    assert metrics["reward/mean"].tolist() == [each["reward/mean"] for each in records(chain[0] / "helpful-ppo")]
    assert metrics.index.name == "step"


def test_ppo_takes_at_most_forty_lines_of_python() -> None:
    assert len((PYTHON / "ppo.py").read_text().splitlines()) <= 40
    jobs = rlhf.load(runpy.run_path(str(PYTHON / "ppo.py"))["chain"])
    assert [(job.name, job.spec.algorithm.name) for job in jobs] == [
        ("sft", "SFT"),
        ("rm", "RewardModel"),
        ("ppo", "PPO"),
    ]


@pytest.mark.slow
def test_ppo_runs_from_python(tmp_path: Path) -> None:
    shown = script("ppo.py", tmp_path / "run", "training.totalSteps=2", "ppo:training.promptBatchSize=32")
    assert re.search(r"step +\n1 +-?\d", shown)
    assert len(rlhf.load_run(tmp_path / "run")["ppo"].records) == 2


def test_the_table_names_what_there_is() -> None:
    table = PAGE[PAGE.index("| name | what |") : PAGE.index("**What is stable**")]
    named = {name.partition("(")[0] for name in re.findall(r"`([\w.]+(?:\(\w+\))?)`", table)}
    there = {*rlhf.__all__, *rlhf.workers.__all__, "rlhf.workers", "jobs", "environment", "exit_code"}
    assert named - there - {"Run"} == {"rlhf run", "rlhf plan --json"} & named
    assert {"load", "run", "plan", "load_run", "register", "Batch", "ActorWorker"} <= named


@pytest.mark.parametrize("module", [rlhf, rlhf.workers])
def test_everything_public_is_documented(module: Any) -> None:
    public = [getattr(module, name) for name in module.__all__]
    code = [each for each in public if inspect.isclass(each) or inspect.isfunction(each)]
    assert len(code) > 10
    assert [each for each in code if not each.__doc__] == []
