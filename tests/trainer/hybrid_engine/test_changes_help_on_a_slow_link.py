"""Two ranks whose only link is slow: changed weights are few bytes on the wire, and what arrives has the same bits."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.repo.tree import ROOT
from tests.trainer.hybrid_engine.slow_link import CARD, EXCHANGES, MODEL

pytestmark = pytest.mark.slow

RATE = "16mbit"
SHARE = 0.15
"""Of the bytes of all weights."""
ADDRESSES = ("10.251.7.1", "10.251.7.2")
DEADLINE_SECONDS = PATIENCE_SECONDS


def run(*command: str) -> str:
    """What it prints; a test that may not make networks is skipped."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is missing; install the package iproute2")
    if done.returncode:
        pytest.skip(f"no networks of our own here: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture
def networks() -> Iterator[list[str]]:
    """Two networks, joined by a link that is slow from the first to the second."""
    names = [f"rlhf-{os.getpid()}-{each}" for each in ("a", "b")]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "-n", names[0], "link", "add", CARD, "type", "veth", "peer", "name", CARD, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/30", "dev", CARD)
            for card in ("lo", CARD):
                run("ip", "-n", name, "link", "set", card, "up")
        run("tc", "-n", names[0], "qdisc", "add", "dev", CARD, *f"root tbf rate {RATE} burst 32kb latency 1s".split())
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def outcome(names: list[str]) -> list[dict[str, dict[str, list[Any]]]]:
    """What each rank told, by what was sent."""
    program = [sys.executable, "-m", "tests.trainer.hybrid_engine.slow_link"]
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *program, str(rank), ADDRESSES[0]], cwd=ROOT, stdout=subprocess.PIPE
        )
        for rank, name in enumerate(names)
    ]
    try:
        return [json.loads(rank.communicate(timeout=DEADLINE_SECONDS)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def test_changes_are_few_bytes_on_a_slow_link(networks: list[str]) -> None:
    sender, receiver = outcome(networks)
    for kind in ("Full", "Delta"):
        assert receiver[kind]["weights"] == sender[kind]["weights"]
        assert len(set(sender[kind]["weights"])) == EXCHANGES, "else nothing would be compared"
    full, delta = sender["Full"]["bytes"], sender["Delta"]["bytes"]
    size = 2 * sum(math.prod(parameter.shape) for parameter in MODEL)
    assert min(full) > size, "every weight is on the wire, and what the network adds"
    assert delta[0] > size, "at first nothing is known"
    assert max(delta[1:]) <= SHARE * min(full)
    held_up = run("tc", "-n", networks[0], "-s", "-j", "qdisc", "show", "dev", CARD)
    assert json.loads(held_up)[0]["overlimits"] > 0, "the link was what all waited for"
    seconds = {kind: sum(sender[kind]["seconds"][1:]) for kind in ("Full", "Delta")}
    share = sum(delta[1:]) / sum(full[1:])
    sys.stdout.write(f"at {RATE}: {share:.3f} of the bytes, {seconds['Delta'] / seconds['Full']:.2f} of the time\n")
