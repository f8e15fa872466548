"""Whatever goes wrong is one sentence on stderr and the exit code of its kind, without a traceback; nothing is left."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf_api.exit_codes import ExitCode
from rlhf_trainer.commands.cli import app
from tests.patience import PATIENCE_SECONDS
from tests.trainer.chain.conftest import ROOT
from tests.trainer.chain.leftovers import nothing_left_behind, planted_in
from tests.trainer.chain.mistakes import BEFORE_RAY, MISTAKES, RUNS, SFT, VALIDATE, Mistake, messages


def written(mistake: Mistake, folder: Path) -> tuple[Path, list[str]]:
    """(manifest, options) of a mistake, with what it needs beside the manifest."""
    manifest = folder / "job.yaml"
    manifest.write_text(mistake.manifest)
    mistake.prepare(folder)
    options = [option.format(folder=folder) for option in mistake.options]
    return manifest, [*(f"--set={change}" for change in mistake.sets), *options]


@pytest.mark.parametrize("name", VALIDATE)
def test_validate_tells(name: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    manifest, options = written(mistake, tmp_path)
    done = CliRunner().invoke(app, ["validate", str(manifest), *options])
    assert done.exit_code == mistake.code
    assert told(done.stderr, mistake), done.stderr


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("name", BEFORE_RAY)
def test_a_run_tells_before_anything_starts(name: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    manifest, options = written(mistake, tmp_path)
    done = CliRunner().invoke(app, ["run", str(manifest), f"--output={tmp_path / 'run'}", *options])
    assert done.exit_code == mistake.code
    assert told(done.stderr, mistake), done.stderr


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """A small disk of its own for the cases that ask for one."""
    size = MISTAKES[request.node.callspec.params["name"]].disk
    if not size:
        yield
        return
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(tmp_path / "disk")]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield
    subprocess.run(["umount", str(tmp_path / "disk")], check=True)


@pytest.mark.slow
@pytest.mark.usefixtures("disk")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_tells_and_leaves_nothing_behind(name: str, models: Path, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    (tmp_path / "models").symlink_to(models)
    manifest, options = written(mistake, tmp_path)
    output = Path(options[options.index("--output") + 1]) if "--output" in options else tmp_path / "run"
    command = [sys.executable, "-m", "rlhf_trainer", "run", str(manifest), f"--output={output}", *options]
    with nothing_left_behind() as marks:
        own = {variable: value.format(folder=tmp_path) for variable, value in mistake.environment.items()}
        environment = {**os.environ, **marks, **own}
        running = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        shown, errors = running.communicate(timeout=PATIENCE_SECONDS)
    assert running.returncode == mistake.code, errors
    assert told(errors, mistake), errors
    assert not planted_in(shown + errors, output)
    assert not (tmp_path / "was-run").exists(), "a pickle was opened"
    if not mistake.disk and (begun := list(output.glob("*/status.json"))):  # none where Ray did not start
        status = json.loads(begun[0].read_text())
        assert (status["phase"], status["lastFailure"]["exitCode"]) == ("Failed", mistake.code)
        assert status["lastFailure"]["message"] == errors.removeprefix("error: ").strip()


def told(errors: str, mistake: Mistake) -> bool:
    """Whether stderr is the sentence of the mistake and nothing else."""
    lines = errors.strip().splitlines()
    return len(lines) == 1 and lines[0].startswith("error: ") and mistake.matches(lines[0].removeprefix("error: "))


def test_windows_line_ends_and_a_byte_order_mark_are_no_mistake(tmp_path: Path) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_bytes(b"\xef\xbb\xbf" + SFT.replace("\n", "\r\n").encode())
    assert CliRunner().invoke(app, ["validate", str(manifest)]).stdout == "ok\n"


def test_a_manifest_is_checked_against_its_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its finished jobs may be read by job://."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(SFT)
    sets = ["--set", "models.actor.uri=job://before"]
    assert CliRunner().invoke(app, ["validate", "job.yaml", *sets]).exit_code == ExitCode.SPEC
    before = tmp_path / "runs" / "job" / "before"
    (before / "model").mkdir(parents=True)
    files = {"job.yaml": SFT, "inputs.json": "{}", "status.json": '{"phase": "Succeeded"}'}
    for name, text in files.items():
        (before / name).write_text(text)
    assert CliRunner().invoke(app, ["validate", "job.yaml", *sets]).stdout == "ok\n"


def test_the_page_of_messages_is_this_list() -> None:
    assert (ROOT / "docs" / "messages.md").read_text() == messages()


def test_every_remedy_is_under_its_exit_code() -> None:
    tables = dict(part.split(":", 1) for part in messages().split("## Exit code ")[1:])
    for mistake in MISTAKES.values():
        listed = f"| `{mistake.sentence}` | {mistake.remedy} |" in tables[str(int(mistake.code))]
        assert listed == bool(mistake.remedy)


def test_a_sentence_is_matched_from_end_to_end() -> None:
    """Else every case above would pass for a run that tells something else."""
    mistake = MISTAKES["a model that is not there"]
    assert mistake.matches("helpful-sft: spec.models.actor.uri: file:///nowhere: there is none")
    assert not mistake.matches("internal error: helpful-sft: spec.models.actor.uri: file:///nowhere")


def test_a_secret_is_found_where_it_is_seen(tmp_path: Path) -> None:
    (tmp_path / "events.log").write_text("the token is planted000002")
    assert planted_in("hf_planted000001", tmp_path) == [
        "HF_TOKEN in output",
        f"AWS_SECRET_ACCESS_KEY in {tmp_path}/events.log",
    ]
