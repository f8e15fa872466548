"""A PPO job that was stopped, continued by the same command: the numbers of the run that never stopped.

With the same layout metrics and files are equal bit for bit, as those of any two runs with the same seed are. Resumed
on other numbers of ranks, sums are taken in another order: then 1e-4 relative, 1e-5 absolute, as for placement.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from rlhf_trainer.checkpoint import CheckpointStore
from rlhf_trainer.commands.cli import app
from tests.patience import PATIENCE_SECONDS
from tests.trainer.chain import continued
from tests.trainer.chain.conftest import KEPT, MANIFEST, SHORT, TWO_POOLS, only_ppo_left, records, rlhf
from tests.trainer.chain.continued import FAULT_SITE, RUN, assert_same_bits, numbers, status_of, wait_until
from tests.trainer.measured import SHARED
from tests.trainer.weights import whole_weights

PPO = "helpful-ppo"
LAYOUT = (*RUN, *SHARED, "ratio/", "bytes/transfer", "kl/rollout")
"""Metrics that depend on the layout too: rounding errors, padding, and what ranks hold and fetch."""
RESHARDS = 4
"""Two of the first evaluation and one of each step: when the second step begins to generate."""
RESHARDS_AFTER_RESUME = 1
"""Without the first evaluation: when a run that goes on begins to generate."""
EVERY_STEP = "--set=helpful-ppo:checkpoint.everySteps=1"
ONE_SLOT = ("--set=helpful-ppo:resources.slotsPerNode=1",)


@contextmanager
def running(output: Path, *options: str, reshards: int = RESHARDS) -> Iterator[subprocess.Popen[str]]:
    """`rlhf run` of the shortened example, whose second step waits until `release`."""
    place = output.parent / "place"
    place.mkdir()
    path = os.pathsep.join(filter(None, [str(FAULT_SITE), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": path, "RLHF_FAULT": f"{place}|wait|generation|{reshards}"}
    with continued.running(MANIFEST, output, *SHORT, *options, environment=environment) as process:
        wait_until((place / "fired").exists)
        assert steps_done(output) == 1
        yield process


def release(output: Path) -> None:
    (output.parent / "place" / "released").touch()


def await_stopping(process: subprocess.Popen[str]) -> str:
    """Read what a run shows until it has taken note of a signal, and return it."""
    assert process.stdout is not None
    shown = ""
    for line in process.stdout:
        shown += line
        if "stopping after this step" in line:
            break
    assert "stopping after this step" in shown
    return shown


def stop(process: subprocess.Popen[str], output: Path) -> str:
    """Send all processes of a run SIGTERM in its second step, as service managers do; return what the terminal showed.

    The run must save its second step and leave no process.
    """
    family = psutil.Process(process.pid).children(recursive=True)
    for member in (process, *family):
        member.send_signal(signal.SIGTERM)
    shown = await_stopping(process)
    release(output)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 143, errors
    assert errors == "error: stopped by SIGTERM; the checkpoint of step 2 is saved\n"
    status = status_of(output / PPO)
    assert (status["phase"], status["checkpoint"]["step"]) == ("Stopped", 2)
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_SECONDS)
    assert not alive, "something of the run is still there"
    return shown


def killed(whole: Path, output: Path, step: int) -> Path:
    """Copy a finished run to `output`, as if PPO had been killed before a checkpoint after `step` was whole."""
    shutil.copytree(whole, output)
    for checkpoint in CheckpointStore(str(output / PPO / "checkpoints")).all():
        if checkpoint.step > step:
            shutil.rmtree(checkpoint.uri)
    shutil.rmtree(output / PPO / "model")
    (output / PPO / "status.json").write_text(json.dumps(status_of(output / PPO) | {"phase": "Running"}))
    return output


def steps_done(output: Path) -> int:
    metrics = output / PPO / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.is_file() else 0


def resume(output: Path, *options: str) -> str:
    """The same command again; what the terminal showed."""
    done = rlhf("run", MANIFEST, f"--output={output}", *SHORT, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_same_run(output: Path, whole: Path) -> None:
    """The metrics of every step, and what was measured at the end."""
    assert numbers(output / PPO) == numbers(whole / PPO)
    mine, theirs = (measured(folder) for folder in (output, whole))
    assert mine == theirs


def assert_same_metrics(output: Path, whole: Path, *, but: tuple[str, ...], relative: float, absolute: float) -> None:
    mine, theirs = records(output / PPO), records(whole / PPO)
    assert [record["step"] for record in mine] == [record["step"] for record in theirs]
    for record, other in zip(mine, theirs, strict=True):
        for name in [name for name in other if not name.startswith(but)]:
            assert record[name] == pytest.approx(other[name], rel=relative, abs=absolute), (record["step"], name)


def measured(folder: Path) -> dict[str, float]:
    """The numbers of the job in summary.json, without the time it took."""
    summary: dict[str, float] = json.loads((folder / "summary.json").read_text())[PPO]
    return {name: value for name, value in summary.items() if name not in ("seconds", "end_tokens")}


@pytest.fixture(scope="module")
def stopped(chain: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run that was stopped in its second step."""
    output = only_ppo_left(chain, tmp_path_factory.mktemp("stopped") / "run")
    with running(output) as process:
        stop(process, output)
    return output


def test_a_killed_run_goes_on_and_stops_when_it_is_told_to(chain: tuple[Path, str], tmp_path: Path) -> None:
    """After its first step, until it is stopped in the second: that is the one of the run that was not disturbed."""
    output, whole = killed(chain[0], tmp_path / "run", 1), chain[0] / PPO
    with running(output, *KEPT, reshards=RESHARDS_AFTER_RESUME) as process:
        shown = stop(process, output)
    assert f"{PPO}: goes on after step 1, from {output}" in shown
    mine, theirs = numbers(output / PPO), numbers(whole)
    assert mine == theirs[:2]
    assert mine[0]["loss/policy"] != mine[1]["loss/policy"]
    (saved,), (other,) = (
        [found.uri for found in CheckpointStore(str(folder / "checkpoints")).all() if found.step == 2]
        for folder in (output / PPO, whole)
    )
    for role in ("actor", "critic"):
        weights, expected = (whole_weights(f"{uri}/{role}") for uri in (saved, other))
        assert weights
        assert all(weights[name].equal(expected[name]) for name in expected)
    links = status_of(whole)["links"]
    assert {"actor/product", "critic/product"} <= {link["name"] for link in links if float(link["value"]) > 0}


@pytest.mark.slow
def test_two_runs_with_the_same_seed_measure_the_same_to_the_bit(chain: tuple[Path, str], stopped: Path) -> None:
    """Until the second is stopped; what it goes on to and its model are compared below."""
    mine, theirs = numbers(stopped / PPO), numbers(chain[0] / PPO)
    assert mine == theirs[:2]


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_as_if_it_never_had(
    chain: tuple[Path, str], stopped: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    shutil.copytree(stopped, output)
    assert f"{PPO}: goes on after step 2, from {output}" in resume(output, EVERY_STEP)
    assert_same_run(output, chain[0])
    assert_same_bits(output / PPO, chain[0] / PPO)


@pytest.mark.usefixtures("handlers")
def test_a_finished_run_says_so_and_does_nothing(chain: tuple[Path, str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in chain[0].rglob("*.json*")}
    again = CliRunner().invoke(app, ["run", str(MANIFEST), f"--output={chain[0]}", *SHORT])
    assert (again.exit_code, again.stdout.count("already finished")) == (0, 3)
    assert {path: path.stat().st_mtime_ns for path in chain[0].rglob("*.json*")} == before


def goes_on_as_it_would(stopped: Path, whole: Path, output: Path, *options: str) -> str:
    """Go on with other options; what the terminal showed. But for rounding, all that is measured must be the same."""
    shutil.copytree(stopped, output)
    shown = resume(output, *options)
    assert "goes on after step 2" in shown
    assert_same_metrics(output, whole, but=LAYOUT, relative=1e-4, absolute=1e-5)
    assert measured(output) == pytest.approx(measured(whole), abs=0.05), "a token or two may be sampled otherwise"
    before, mine, theirs = (
        load_file(str(model / "model.safetensors"))
        for model in (whole / "helpful-sft" / "model", output / PPO / "model", whole / PPO / "model")
    )
    for name, weight in theirs.items():
        assert (weight - mine[name]).norm() < 1e-3 * (weight - before[name]).norm(), f"{name} has learned otherwise"
    return shown


@pytest.mark.slow
def test_it_goes_on_on_two_pools_whose_models_leave(chain: tuple[Path, str], stopped: Path, tmp_path: Path) -> None:
    """The actor and the reward model leave theirs while they are not in use."""
    output = tmp_path / "run"
    offload = ("--set=helpful-ppo:models.actor.offload=All", "--set=helpful-ppo:models.reward.offload=Parameters")
    shown = goes_on_as_it_would(stopped, chain[0], output, *TWO_POOLS, *offload)
    assert "1 CPU slot (actor, reference) | 1 CPU slot (critic, reward)" in shown
    *before, apart = records(output / PPO)
    for role in ("actor", "reward"):
        assert all(together[f"idle_bytes/{role}"] > 0 for together in before)
        assert apart[f"idle_bytes/{role}"] == 0
    assert apart["bytes/controller"] == 0


@pytest.mark.slow
def test_it_goes_on_on_one_slot(chain: tuple[Path, str], stopped: Path, tmp_path: Path) -> None:
    goes_on_as_it_would(stopped, chain[0], tmp_path / "run", *ONE_SLOT)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--set=helpful-ppo:training.seed=5", "helpful-ppo: spec.training.seed: is not what it was"),
        ("--set=helpful-ppo:training.totalSteps=1", "helpful-ppo: spec.training: gives 1 steps, but 2 are done"),
    ],
)
def test_another_experiment_is_refused(chain: tuple[Path, str], tmp_path: Path, option: str, sentence: str) -> None:
    output = killed(chain[0], tmp_path / "run", 2)
    before = (output / PPO / "metrics.jsonl").read_bytes()
    done = CliRunner().invoke(app, ["run", str(MANIFEST), f"--output={output}", *SHORT, option])
    assert (done.exit_code, sentence in done.stderr) == (2, True), done.stderr
    assert (output / PPO / "metrics.jsonl").read_bytes() == before, "nothing is lost"


@pytest.mark.slow
def test_a_run_whose_disk_is_gone_goes_on_from_s3(chain: tuple[Path, str], s3: str, tmp_path: Path) -> None:
    output = only_ppo_left(chain, tmp_path / "run")
    storage, place = f"--set=helpful-ppo:checkpoint.storage={s3}/runs", f"{s3}/runs/run/{PPO}"
    with running(output, storage) as process:
        release(output)
        asked = rlhf("save-now", output)
        assert asked.stdout.startswith(f"{place}/step-"), asked.stderr
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_SECONDS)
    shutil.rmtree(output / PPO)
    assert f"from {place}/step-" in resume(output, storage)
    assert_same_run(output, chain[0])
    assert not (output / PPO / "checkpoints").exists()
    exported = rlhf("export", CheckpointStore(place).all()[-1].uri, tmp_path / "exported")
    assert exported.returncode == 0, exported.stderr
    saved, other = (
        load_file(str(folder / "model.safetensors")) for folder in (tmp_path / "exported", chain[0] / PPO / "model")
    )
    assert all(saved[name].equal(other[name]) for name in other)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGHUP", 143)])
def test_ctrl_c_or_a_closed_terminal_has_the_run_save(
    chain: tuple[Path, str], tmp_path: Path, name: str, code: int
) -> None:
    output = only_ppo_left(chain, tmp_path / "run")
    with running(output) as process:
        os.killpg(process.pid, signal.Signals[name])
        await_stopping(process)
        release(output)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, errors) == (code, f"error: stopped by {name}; the checkpoint of step 2 is saved\n")
    resume(output)
    assert_same_bits(output / PPO, chain[0] / PPO)


@pytest.mark.slow
def test_a_second_signal_stops_at_once_and_leaves_nothing(chain: tuple[Path, str], tmp_path: Path) -> None:
    output = only_ppo_left(chain, tmp_path / "run")
    with running(output) as process:
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        await_stopping(process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, errors) == (143, "error: stopped by SIGTERM\n")
    assert CheckpointStore(str(output / PPO / "checkpoints")).newest() is None
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_SECONDS)
    assert not alive, "something of the run is still there"
