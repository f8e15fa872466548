"""Each fault of faults.py, at each of its places: found, named, and without a trace in what is trained.

One of them is for every run of the tests; `make test-chaos` does all.
"""

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlhf_trainer.checkpoint import CheckpointStore
from tests.patience import PATIENCE_SECONDS
from tests.trainer.chain.conftest import ROOT, rlhf
from tests.trainer.chain.continued import (
    FAULT_SITE,
    NCCL_SITE,
    assert_same_bits,
    numbers,
    running,
    status_of,
    wait_until,
)
from tests.trainer.chain.faults import DAMAGES, FAULTS, JOB, KILLED, MANIFEST, SERVICE_PHASES, SERVICE_SECONDS, table
from tests.trainer.chain.leftovers import nothing_left_behind
from tests.trainer.chain.mistakes import matches

DATA = "train.jsonl"


@pytest.fixture(scope="module")
def home(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the manifest, its models and its data."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "job.yaml").write_text(MANIFEST)
    (folder / "models").symlink_to(models)
    shutil.copy(ROOT / "examples" / "rlhf_examples" / "helpful" / DATA, folder / DATA)
    return folder


def run_to_the_end(home: Path, output: Path, options: Sequence[str] = ()) -> str:
    """What the terminal showed."""
    done = rlhf("run", home / "job.yaml", f"--output={output}", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> Path:
    """The folder of the job in a run without a fault."""
    run_to_the_end(home, home / "undisturbed")
    return home / "undisturbed" / JOB


def disturbed(
    home: Path, output: Path, place: tuple[str, str, int], options: Sequence[str] = (), *, on_nccl: bool = False
) -> tuple[int, str]:
    """(exit code, stderr) of a run with a fault, which leaves nothing; place: kind, phase and step."""
    fired = output.parent / "fired"
    fault = "|".join(map(str, (output.parent, *place)))
    with nothing_left_behind() as marks:
        sites = [str(FAULT_SITE), *([str(NCCL_SITE)] if on_nccl else []), os.environ.get("PYTHONPATH", "")]
        environment = {**marks, "PYTHONPATH": os.pathsep.join(sites), "RLHF_FAULT": fault}
        with running(home / "job.yaml", output, *options, environment=environment) as process:
            wait_until(lambda: fired.exists() or process.poll() is not None)
            _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert fired.exists(), errors
    seconds = time.time() - fired.stat().st_mtime
    print(f"{' / '.join(map(str, place))}: found after {seconds:.1f} s")  # noqa: T201 for `seconds` of faults.py
    return process.returncode, errors


def newest_step(job_folder: Path) -> int:
    """Of the newest whole checkpoint; 0 without one."""
    newest = CheckpointStore(str(job_folder / "checkpoints")).newest()
    return newest.step if newest else 0


def goes_on(home: Path, output: Path, undisturbed: Path, step: int, options: Sequence[str] = ()) -> None:
    """The same command goes on after a step, as if nothing had happened."""
    shown = run_to_the_end(home, output, options)
    assert (f"goes on after step {step}," in shown) if step else ("goes on" not in shown)
    assert numbers(output / JOB) == numbers(undisturbed)
    assert_same_bits(output / JOB, undisturbed)


PLACES = [(name, *place) for name, fault in FAULTS.items() for place in fault.places]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "phase", "step"), PLACES)
def test_a_fault_is_found_and_named_and_leaves_no_trace(
    home: Path, undisturbed: Path, tmp_path: Path, name: str, phase: str, step: int
) -> None:
    fault, output = FAULTS[name], tmp_path / "run"
    options = [f"--set={each}" for each in fault.sets]
    code, errors = disturbed(home, output, (fault.kind, phase, step), options, on_nccl=fault.on_nccl)
    assert code == fault.code, errors
    assert fault.is_told(errors), errors
    if code != KILLED:
        status = status_of(output / JOB)
        assert (status["phase"], status["lastFailure"]["exitCode"]) == ("Failed", code)
    saved = max(step - (1 if phase == "checkpoint" else 2), 0)  # it becomes whole at the end of the next step
    assert newest_step(output / JOB) == saved
    goes_on(home, output, undisturbed, saved, options)


@pytest.fixture(scope="module")
def halted(home: Path) -> Path:
    """The run folder of a run that was killed when two checkpoints were whole."""
    output = home / "halted" / "run"
    output.parent.mkdir()
    disturbed(home, output, ("end the controller", "checkpoint", 3))
    return output


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [(name, way) for name, damage in DAMAGES.items() for way in damage.ways])
def test_damaged_files_are_found_and_named_and_leave_no_trace(
    home: Path, undisturbed: Path, halted: Path, name: str, way: str
) -> None:
    damage, output, rows = DAMAGES[name], home / "run", (home / DATA).read_bytes()
    shutil.rmtree(output, ignore_errors=True)
    shutil.copytree(halted, output)
    damage.ways[way](home)
    if damage.code:
        done = rlhf("run", home / "job.yaml", f"--output={output}")
        (home / DATA).write_bytes(rows)
        assert done.returncode == damage.code, done.stderr
        assert matches(f"error: {damage.sentence}\n", done.stderr), done.stderr
    goes_on(home, output, undisturbed, damage.goes_on_after)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["generation", "rollout.receive_weights"])
@pytest.mark.parametrize("on_nccl", [False, True])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_lost_rank_of_a_rollout_pool_is_replaced(
    home: Path, undisturbed: Path, tmp_path: Path, staleness: int, *, on_nccl: bool, phase: str
) -> None:
    """Without staleness the losses are those of a run in which nobody died."""
    output, train = tmp_path / "run", "{name: train, models: [actor, critic, reference, reward], slotsPerNode: 2}"
    pools = f"[{train}, {{name: writers, models: [rollout], slotsPerNode: 2}}]"
    options = (f"--set=placement.pools={pools}", f"--set=rollout.maxStaleness={staleness}")
    code, errors = disturbed(home, output, ("end the worker", phase, 2), options, on_nccl=on_nccl)
    assert code == 0, errors
    found = numbers(output / JOB)
    assert [record["step"] for record in found] == [1, 2, 3]
    assert sum(record.pop("rollout_replacements") for record in found) == 1
    assert all(record["staleness"] <= staleness for record in found)
    if not staleness:
        others = numbers(undisturbed)  # of a generator beside the actor, which sleeps meanwhile
        assert {record.pop("idle_bytes/generator") for record in others} == {0.0}
        assert found == others
        assert_same_bits(output / JOB, undisturbed)
    # or in the call before, if the process ends before Ray has told of that
    call = "rollout.(generate_sequences|receive_weights)"
    said = rf"rank 1 of pool writers, process \d+ died in {call}; new processes generate again"
    assert re.search(said, (output / JOB / "events.log").read_text())


class Scorer(BaseHTTPRequestHandler):
    """Scores a response by its length."""

    def do_POST(self) -> None:
        call = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"score": len(call["response"])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def service(port: int) -> Iterator[int]:
    """A service at a port, 0 for any; gives the port."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Scorer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_a_reward_service_that_goes_and_comes_back_is_waited_for(home: Path, tmp_path: Path) -> None:
    with service(0) as port:
        pools = "[{name: all, models: [actor, critic, reference], slotsPerNode: 2}]"  # a service lives in none
        options = [f"--set=models.reward={{url: 'http://127.0.0.1:{port}/score'}}", f"--set=placement.pools={pools}"]
        run_to_the_end(home, tmp_path / "undisturbed", options)
    for phase in SERVICE_PHASES:
        output = tmp_path / phase / "run"
        output.parent.mkdir()
        environment = {"PYTHONPATH": str(FAULT_SITE), "RLHF_FAULT": f"{output.parent}|tell|{phase}|2"}
        with running(home / "job.yaml", output, *options, environment=environment) as process:
            with service(port):
                wait_until((output.parent / "fired").exists)
            time.sleep(SERVICE_SECONDS)
            with service(port):
                _, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, errors
        assert numbers(output / JOB) == numbers(tmp_path / "undisturbed" / JOB)
        assert_same_bits(output / JOB, tmp_path / "undisturbed" / JOB)


def test_the_table_has_a_row_for_each_fault() -> None:
    rows = [line.split("|")[1].strip() for line in table().splitlines()[2:]]
    assert rows == [*FAULTS, *DAMAGES]
