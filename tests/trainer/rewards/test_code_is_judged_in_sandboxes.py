"""Commands and judgements in sandboxes, each in one of its own: code gets the score that it gets beside the trainer."""

import errno
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.job import Job
from rlhf_api.sandbox_server import MAX_OUTPUT
from rlhf_trainer import environments
from rlhf_trainer.environments import sandboxed
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.rewards import verifiers
from rlhf_trainer.rewards.code_in_sandboxes import score
from rlhf_trainer.rewards.function import UserFunction
from rlhf_trainer.rewards.sample import LOST, SCORE, STOPPED, UNSERVED, Sample, Score
from rlhf_trainer.rewards.sandboxes import (
    ADDRESS,
    Finished,
    LostSandboxError,
    NoSandboxError,
    Sandboxes,
    sources,
    users_sources,
)
from rlhf_trainer.workers.scoring import IN_SANDBOXES, require_some_judged, reward_code
from tests.api.cases import made
from tests.each import each_case
from tests.trainer.sandbox_pool import Pool, pool

SOON = 60.0
TESTS = "assert add(1, 2) == 3\nassert add(2, 2) == 4"
CODES = (
    "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```",
    "def add(a, b): return a - b",
    "while True: pass",
    "import os\nos.kill(os.getppid(), 9)\ndef add(a, b): return a + b",
    "open('/tmp/x', 'w')\ndef add(a, b): return a + b",
    "import socket\nsocket.socket()\ndef add(a, b): return a + b",
    "x = bytearray(2 * 2**30)\ndef add(a, b): return a + b",
    "import sys\nprint(99)\nsys.stderr.write('99')\ndef add(a, b): return a + b",
    "def add(a, b:",
    "import json\njson.load(open('item.json'))\ndef add(a, b): return a + b",
)
VERIFIER = {"name": "Code", "seconds": 1.0, "memory_mebibytes": 256}


BINDS = """
import os, socket
port = int(open(f"/proc/{os.getppid()}/cmdline").read().split("\\0")[4])
for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")):
    for option in (0, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        with socket.socket(family) as door:
            try:
                door.setsockopt(socket.SOL_SOCKET, option, 1) if option else None
                door.bind((address, port))
                door.listen()
                print("bound", address, option)
            except OSError:
                pass
with socket.socket() as door:
    print(door.connect_ex(("127.0.0.1", port)))
"""
"""Program of the model's that tries to serve at the port of its sandbox."""


@pytest.fixture(scope="module")
def made_pool() -> Iterator[tuple[Sandboxes, Pool]]:
    with pool(2) as found:
        yield found


def run(sandboxes: Sandboxes, *command: str, seconds: float = 20.0, **files: str) -> Finished:
    return sandboxes.run(command, files=files, seconds=seconds, until=time.monotonic() + SOON)


def scores(sandboxes: Sandboxes, codes: tuple[str, ...], *, seconds: float = 300.0) -> list[Any]:
    options = [VERIFIER, seconds, 1, asdict(sandboxes)]
    count = len(codes)
    return score([""] * count, [*codes], [True] * count, **{verifiers.OPTIONS: options}, tests=[TESTS] * count)


def test_a_command_gets_its_files_and_says_how_it_ended(made_pool: tuple[Sandboxes, Pool]) -> None:
    sandboxes, _ = made_pool
    done = run(sandboxes, "sh", "-c", "cat given; echo x$RLHF_JOB_UID; pwd > here; echo no >&2; exit 3", given="text\n")
    assert (done.code, done.output, done.late) == (3, "text\nx\nno\n", False)


def test_nothing_of_a_command_is_there_for_the_next(made_pool: tuple[Sandboxes, Pool]) -> None:
    sandboxes, _ = made_pool
    for _ in range(4):
        assert run(sandboxes, "sh", "-c", "ls; touch mine").output == ""


def test_a_command_cannot_serve_the_next_request(made_pool: tuple[Sandboxes, Pool]) -> None:
    done = run(made_pool[0], "python3", "-c", BINDS)
    assert (done.code, done.output) == (0, f"{errno.ECONNREFUSED}\n")


@each_case(
    ("command", "seconds", "expected"),
    [
        (("sleep", "60"), 0.5, (-9, "", True)),
        (("sh", "-c", "sleep 60 & echo left"), 20.0, (0, "left\n", False)),
        (("sh", "-c", "kill -11 $$"), 20.0, (-11, "", False)),
        (("no-such-program",), 20.0, (127, "[Errno 2] No such file or directory: 'no-such-program'", False)),
    ],
)
def test_any_end_of_a_command_is_an_answer(
    made_pool: tuple[Sandboxes, Pool], command: tuple[str, ...], seconds: float, expected: tuple[int, str, bool]
) -> None:
    done = run(made_pool[0], *command, seconds=seconds)
    assert (done.code, done.output, done.late) == expected


def test_the_end_of_a_long_output_is_kept(made_pool: tuple[Sandboxes, Pool]) -> None:
    done = run(made_pool[0], "python3", "-c", "print('x' * 3_000_000, end='end')")
    assert (len(done.output), done.output[-4:]) == (MAX_OUTPUT, "xend")


def test_a_sandbox_that_is_killed_is_lost() -> None:
    with pool() as (sandboxes, found):
        threading.Timer(1.0, found.kill_one).start()
        with pytest.raises(LostSandboxError, match="lost its sandbox"):
            run(sandboxes, "sleep", "30")
        assert run(sandboxes, "true").code == 0, "another one is there"


def test_its_own_deadline_ends_a_sandbox() -> None:
    with pool(seconds=1.0) as (sandboxes, _), pytest.raises(LostSandboxError):
        run(sandboxes, "sleep", "30", seconds=20.0)


def test_without_a_free_sandbox_the_wait_has_an_end() -> None:
    nobody = Sandboxes("127.0.0.1", 9, 1, 60.0)
    with pytest.raises(NoSandboxError, match="found no free sandbox within 1 s"):
        nobody.run(["true"], files={}, seconds=1.0, until=time.monotonic() + 1.0)


def test_code_gets_the_score_that_it_gets_beside_the_trainer(made_pool: tuple[Sandboxes, Pool]) -> None:
    job = f"{VERIFIER['name']}: "
    options = {verifiers.OPTIONS: [VERIFIER, 300.0, 1]}
    beside = UserFunction(
        "rlhf_trainer.rewards.verifiers:score", arguments=options, seconds=300, deadline=600, path=job
    )
    samples = [
        Sample(step=1, row=row, prompt="", response=code, finished=True, columns={"tests": TESTS})
        for row, code in enumerate(CODES)
    ]
    expected = [{SCORE: each.value, **each.parts} for each in beside.scores(samples)]
    beside.close()
    assert scores(made_pool[0], CODES) == expected
    assert [each[SCORE] for each in expected] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert expected[2][STOPPED] == 1.0


def test_a_response_that_loses_two_sandboxes_has_no_third(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool() as (sandboxes, found):
        real = Sandboxes.open

        def lost(self: Sandboxes, *given: Any, **more: Any) -> Any:
            channel = real(self, *given, **more)
            found.kill_one()
            return channel

        monkeypatch.setattr(Sandboxes, "open", lost)
        assert scores(sandboxes, CODES[:1]) == [{SCORE: None, LOST: 2.0}]


def test_a_response_without_a_sandbox_is_left_out() -> None:
    nobody = Sandboxes("127.0.0.1", 9, 1, 60.0)
    assert scores(nobody, CODES[:1], seconds=1.0) == [{SCORE: None, UNSERVED: 1.0}]


ENDS: dict[str, Finished | Exception] = {
    "right": Finished(0, "1", late=False),
    "slow": Finished(-9, "", late=True),
    "killed": Finished(-9, "", late=False),
    "lost": LostSandboxError("lost its sandbox"),
    "nowhere": NoSandboxError("found no free sandbox"),
}
"""Response -> how each run of its judge ends."""
RIGHT, STOP = {SCORE: 1.0, "tests": 1.0}, {SCORE: 0.0, STOPPED: 1.0}


@pytest.mark.parametrize(
    ("responses", "seconds", "expected"),
    [
        (("right", "lost", "killed"), 300.0, [RIGHT, {SCORE: 0.0, LOST: 2.0}, {SCORE: 0.0, LOST: 2.0}]),
        (("slow", "lost"), 300.0, [STOP, {SCORE: 0.0, LOST: 2.0}]),
        (("killed", "lost"), 300.0, [{SCORE: None, LOST: 2.0}] * 2),
        (("lost", "nowhere"), 300.0, [{SCORE: None, LOST: 2.0}, {SCORE: None, UNSERVED: 1.0}]),
        (("slow",), 0.0, [{SCORE: None, UNSERVED: 1.0}]),
    ],
)
def test_a_loss_is_wrong_only_if_another_response_was_judged(
    responses: tuple[str, ...], seconds: float, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, files: dict[str, str], **__: Any) -> Finished:
        end = ENDS[json.loads(files["item.json"])[0].strip()]
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(Sandboxes, "run", run)
    found = scores(Sandboxes("127.0.0.1", 9, 2, 60.0), responses, seconds=seconds)
    assert found == expected
    samples = [Sample(step=1, row=row, prompt="", response="", finished=True) for row in range(len(found))]
    judged = [Score(each[SCORE], {name: part for name, part in each.items() if name != SCORE}) for each in found]
    is_for_nothing = len(found) > 1 and all(each.value is None for each in judged)
    with pytest.raises(EnvironmentProblem, match="x: none of 2 resp") if is_for_nothing else nullcontext():
        require_some_judged("x", samples, judged)


def test_the_time_of_all_judgements_ends_one_that_runs(made_pool: tuple[Sandboxes, Pool]) -> None:
    done = made_pool[0].run(["sleep", "60"], files={}, seconds=30.0, until=time.monotonic() + 1.0)
    assert (done.code, done.late) == (-9, True)


def test_our_own_files_are_sent_without_their_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(environments.__file__).parent
    for name in ("gymnasium", "httpx", "verifiers"):
        monkeypatch.setitem(sys.modules, name, None)
    for path in folder.glob("*_*.py"):
        monkeypatch.delitem(sys.modules, f"rlhf_trainer.environments.{path.stem}", raising=False)
    sent = {Path(path).name: text for path, text in sources(sandboxed.MODULES).items() if "environments/" in path}
    beside_the_trainer = {"of_job.py"}
    assert sent.keys() == {path.name for path in folder.glob("*.py")} - beside_the_trainer
    assert sent["gymnasium_games.py"] == (folder / "gymnasium_games.py").read_text()


@pytest.mark.parametrize(
    ("entrypoint", "expected"),
    [
        ("alone_of_test:f", {"alone_of_test.py"}),
        ("whole_of_test.part:f", {"whole_of_test/__init__.py", "whole_of_test/part.py"}),
        ("bare_of_test.deep.part:f", {"bare_of_test/deep/part.py"}),
        ("json:dumps", set()),
        ("sys:exit", set()),
        ("numpy:array", set()),
        ("rlhf_trainer.environments.tools:Tools", set()),
    ],
)
def test_the_files_of_the_users_module_are_sent(
    entrypoint: str, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("alone_of_test.py", "whole_of_test/__init__.py", "whole_of_test/part.py", "bare_of_test/deep/part.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("f = print")
    monkeypatch.syspath_prepend(tmp_path)
    assert users_sources(entrypoint).keys() == expected


@pytest.mark.parametrize(("responses", "count"), [(6, 2), pytest.param(64, 8, marks=pytest.mark.slow)])
def test_many_responses_are_judged_over_few_sandboxes(responses: int, count: int) -> None:
    with pool(count) as (sandboxes, found):
        assert scores(sandboxes, CODES[:1] * responses) == [{SCORE: 1.0, "tests": 1.0}] * responses
        assert len(found.programs) >= responses, "none was used twice"


def test_only_the_verifier_code_goes_there_and_only_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("rlhf_trainer.workers.scoring.UserFunction", lambda program, **_: asked.append(program))
    code, math = (f"models.reward={{verifier: {{name: {name}}}}}" for name in ("Code", "Math"))
    asks = ("GRPO", (code, "sandbox={warm: 3}"))
    others = (("GRPO", (code,)), ("GRPO", (math, "rollout.tools=['a:b']", "sandbox={}")))
    for place, job in enumerate(Job.parse(made(*each)) for each in (asks, asks, *others)):
        if place == 1:
            monkeypatch.setenv(ADDRESS, "job-a1-sandbox.team.svc:8492")
        reward_code(job, ranks=1, sandboxes=Sandboxes.of(job.spec.sandbox, sharers=1))
    assert [each == IN_SANDBOXES for each in asked] == [False, True, False, False]
    for sharers, share in ((1, 3), (2, 1), (4, 1)):
        found = Sandboxes.of(Job.parse(made(*asks)).spec.sandbox, sharers=sharers)
        assert found == Sandboxes("job-a1-sandbox.team.svc", 8492, share, 600.0)
