"""Code of the model may write all that comes from a sandbox: at most its own episode ends, and the trainer goes on."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlhf_api.sandbox_server import receive, send
from rlhf_trainer.environments.environments import MAX_BYTES, TAKEN, Environments
from rlhf_trainer.environments.sandboxed import MAX_CONNECTIONS, SandboxedEpisodes, Tunnel
from rlhf_trainer.rewards.sandboxes import Sandboxes
from rlhf_trainer.rewards.supervision import AnswerFailure
from tests.each import each_case

PATIENT = 20.0
NESTED = '{"answer": ' + 100_000 * "[" + 100_000 * "]" + "}"
STEP_REWARDS = "step gave as reward"


@contextmanager
def episode(method: str, **options: Any) -> Iterator[tuple[Environments, socket.socket]]:
    """An episode of which a method is asked, and the end of its socket at which a sandbox answers."""
    ours, theirs = socket.socketpair()
    made = Environments(["a:b"], arguments={}, path="x", open_sandbox=lambda _: (ours, ours.close), **options)
    made.begin(0, seed=1)
    made.ask(0, method, {})
    with theirs:
        send(theirs, TAKEN)
        yield made, theirs
    made.close()


def answer_of(made: Environments) -> Any:
    until = time.monotonic() + PATIENT
    while time.monotonic() < until:
        if found := made.answers(seconds=1.0):
            return found[0][1]
    raise AssertionError("no answer")


@each_case(
    ("method", "message", "expected"),
    [
        ("step", "{}", "sent what is no answer"),
        ("step", "[]", "sent what is no answer"),
        ("step", '"problem"', "sent what is no answer"),
        ("step", '{"begun": true}', "sent what is no answer"),
        ("step", "{", "sent what is no answer: Expecting property name"),
        ("step", NESTED, "sent what is no answer: maximum recursion depth exceeded"),
        ("step", '{"problem": 5}', "sent what is no answer"),
        ("step", '{"problem": ""}', "sent what is no answer"),
        ("step", '{"answer": 5}', "step gave a value of type int, expected (observation, reward, done)"),
        ("step", '{"answer": [null, NaN, true]}', f"{STEP_REWARDS} nan, expected a finite number"),
        ("step", '{"answer": [null, 1e300, true]}', f"{STEP_REWARDS} 1e+300, expected a finite number"),
        ("step", '{"answer": [null, "1", true]}', f"{STEP_REWARDS} a value of type str, expected a number"),
        ("step", '{"answer": ["a", 1000, false]}', f"{STEP_REWARDS} 1000.0, but tools give none"),
        ("reset", '{"answer": [5]}', "reset gave a value of type list, expected a text"),
        ("run", '{"answer": "1000"}', "run gave as reward a value of type str, expected a number"),
        ("run", r'{"problem": "\ud800"}', r"\ud800"),
        ("run", r'{"code": 3, "output": "a\n\ud800\n"}', r"ended its process with exit code 3: \ud800"),
        ("run", '{"code": "3", "output": "a"}', "sent what is no answer"),
    ],
)
def test_a_wrong_answer_is_one_sentence(method: str, message: str, expected: str) -> None:
    with episode(method, seconds=PATIENT, has_rewards=False) as (made, theirs):
        body = message.encode()
        theirs.sendall(len(body).to_bytes(4, "big") + body)
        found = answer_of(made)
    assert isinstance(found, AnswerFailure)
    assert found.what.startswith(expected)
    assert found.what.isprintable(), "it is written to logs"


def test_a_sentence_has_a_bound() -> None:
    with episode("run", seconds=PATIENT) as (made, theirs):
        send(theirs, {"problem": "a" * 10_000})
        assert len(answer_of(made).what) == 1000


def test_the_time_of_an_answer_begins_once() -> None:
    with episode("run", seconds=0.3) as (made, theirs):
        assert made.answers(seconds=1.0) == []
        send(theirs, TAKEN)
        assert answer_of(made) == AnswerFailure("sent what is no answer")
    with episode("run", seconds=0.3) as (made, _):
        made.pause(0)  # a call of the model comes before the news
        assert made.answers(seconds=1.0) == []
        made.resume(0)
        assert answer_of(made) == AnswerFailure("did not answer within 0.3 s", kind="late")


@contextmanager
def tunnel() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The other end of the trainer's tunnel, and the listening socket of its model."""
    (pod, channel), (ours, theirs) = socket.socketpair(), socket.socketpair()
    model = socket.create_server(("127.0.0.1", 0), backlog=2 * MAX_CONNECTIONS)
    made = Tunnel(channel, theirs, model=model.getsockname()[:2])
    thread = threading.Thread(target=made.carry)
    thread.start()
    with pod, ours, model, channel, theirs:
        for each in (pod, model):
            each.settimeout(PATIENT)
        yield pod, model
        pod.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENT)
        assert not thread.is_alive()


def test_connections_may_send_in_any_order() -> None:
    with tunnel() as (pod, model):
        for message in (
            *({"connection": number} for number in (0, 1)),
            {"connection": 1, "bytes": "Yg=="},
            {"connection": 0, "bytes": "YQ=="},
        ):
            send(pod, message)
        found = []
        for _ in range(2):
            connection, _ = model.accept()
            with connection:
                found.append(connection.recv(10))
    assert found == [b"a", b"b"]


def test_a_sandbox_opens_few_connections_of_the_trainer() -> None:
    with tunnel() as (pod, _):
        for number in range(MAX_CONNECTIONS + 3):
            send(pod, {"connection": number})
        closed = [receive(pod) for _ in range(3)]
    assert closed == [{"connection": MAX_CONNECTIONS + each, "bytes": ""} for each in range(3)]


@contextmanager
def pod_of(sent: bytes) -> Iterator[tuple[Environments, socket.socket]]:
    """An episode in a sandbox that takes the request and then sends some bytes, and the sandbox's connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENT)
        sandboxes = Sandboxes("127.0.0.1", listener.getsockname()[1], 1, PATIENT)
        episodes = SandboxedEpisodes(sandboxes, ["rlhf_trainer.a:b"], arguments={}, patience=PATIENT)
        made = Environments(["a:b"], arguments={}, path="x", open_sandbox=episodes.open, seconds=PATIENT)
        made.begin(0, seed=1)
        made.ask(0, "reset", {})
        pod, _ = listener.accept()
        with pod:
            pod.settimeout(PATIENT)
            receive(pod)
            send(pod, {"taken": True})
            assert receive(pod) == {"reset": {}}
            pod.sendall(sent)
            yield made, pod
    made.close()


def test_an_ended_episode_leaves_no_connection_to_its_sandbox() -> None:
    with pod_of((100).to_bytes(4, "big") + b"{") as (made, pod):
        assert made.answers(seconds=0.1) == []
        made.end(0)
        assert pod.recv(1) == b"", "though half a message is there"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ((MAX_BYTES + 1).to_bytes(4, "big"), f"sent what is no message: it has {MAX_BYTES + 1} bytes, more than"),
        ((1).to_bytes(4, "big") + b"5", "sent what is no message: "),
        ((19).to_bytes(4, "big") + b'{"connection": [5] }', "sent what is no message: "),
    ],
)
def test_a_wrong_message_ends_the_episode(sent: bytes, expected: str) -> None:
    with pod_of(sent) as (made, _):
        found = answer_of(made)
    assert found.what.startswith(expected)


def test_nobody_looks_for_a_sandbox_of_an_ended_episode() -> None:
    others = {*threading.enumerate()}
    episodes = SandboxedEpisodes(Sandboxes("127.0.0.1", 9, 1, PATIENT), ["a:b"], arguments={}, patience=600.0)
    made = Environments(["a:b"], arguments={}, path="x", open_sandbox=episodes.open, seconds=PATIENT)
    made.begin(0, seed=1)
    made.ask(0, "reset", {})
    made.close()
    for each in {*threading.enumerate()} - others:
        each.join(PATIENT)
        assert not each.is_alive()
