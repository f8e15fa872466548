"""Torch's store of a group answers the machines of the group: its listener is closed to all others."""

import os
import socket
import struct
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from rlhf_trainer import meeting as meeting_module
from rlhf_trainer.controller import worker_group
from rlhf_trainer.controller.slot_process import SlotProcess
from rlhf_trainer.meeting import LOOPBACK, Meeting
from rlhf_trainer.training import distributed
from tests.trainer.ranks import run_ranks

OWN, STRANGER, RANK = "127.0.0.1", "127.0.0.3", "127.0.0.2"
"""Addresses of the loopback interface stand in for machines."""
SECONDS = timedelta(seconds=10)
HELLO = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 12345)
"""Greeting of a client to torch's store; the store repeats the number at the end."""
LISTENS = "0A"
"""State of a socket in /proc/net/tcp."""


def free_port(address: str = RANK) -> int:
    """A port on which nobody listens."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
        free.bind((address, 0))
        return int(free.getsockname()[1])


def is_heard(meeting: Meeting, source: str) -> bool:
    """Whether a connection from an address is answered, by torch's store at that meeting."""
    try:
        connection = socket.create_connection((meeting.address, meeting.port), timeout=0.5, source_address=(source, 0))
        with connection:
            connection.sendall(HELLO)
            return connection.recv(4) == HELLO[-4:]
    except OSError:
        return False


def source_address(machine: str) -> str:
    """The address from which a slot of this machine connects."""
    return SlotProcess.source_address(None, machine)  # type: ignore[arg-type]


def test_a_machine_without_ranks_gets_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "LOOPBACK_NETWORK", 0x0A000000)
    meeting = Meeting(address=RANK, port=free_port(), machines=[source_address(RANK), "10.0.0.7"])
    store = distributed.open_store(meeting, 0, 2, SECONDS)
    store.set("a", "b")
    for _ in range(4):  # without a rule every other connection would get through
        assert is_heard(meeting, OWN)
        assert not is_heard(meeting, STRANGER)
    assert store.list_keys() == ["a"]


def test_a_proxy_in_the_pod_gets_one() -> None:
    meeting = Meeting(address=RANK, port=free_port(), machines=["10.0.0.7"])
    store = distributed.open_store(meeting, 0, 2, SECONDS)
    assert all(is_heard(meeting, STRANGER) for _ in range(4))
    assert store.list_keys() == []


def test_a_store_is_at_one_address_only() -> None:
    meeting = Meeting(address=RANK, port=free_port())
    store = distributed.open_store(meeting, 0, 2, SECONDS)
    assert is_heard(meeting, STRANGER)
    assert not is_heard(Meeting(address=OWN, port=meeting.port), OWN)
    assert store.list_keys() == []


MANY = [f"10.{place // 250}.{place % 250}.1" for place in range(2100)]


@pytest.mark.parametrize(("address", "machines"), [(RANK, MANY), ("::1", ["::1"])], ids=["too many", "IPv6"])
def test_a_rule_that_cannot_be_is_a_warning(
    address: str, machines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    meeting = Meeting(address=address, port=free_port(address), machines=machines)
    store = distributed.open_store(meeting, 0, 2, SECONDS)
    assert all(is_heard(meeting, address) for _ in range(4))
    assert store.list_keys() == []
    assert "answers any machine" in caplog.text


class Rank:
    """A process of a slot, as Ray would give a handle to it."""

    def __init__(self, address: str) -> None:
        self.rendezvous, self.source_address = self, self
        self.address = address

    def remote(self, *towards: str) -> object:
        """The answer to either method."""
        return self.address if towards else (self.address, 29500)


HERE, THERE = "10.0.0.1", "10.0.0.2"


@pytest.mark.parametrize(
    ("own", "other", "beyond_ray", "expected"),
    [
        ([HERE, HERE], [], False, Meeting(address=LOOPBACK, port=29500)),
        ([HERE], [HERE], False, Meeting(address=LOOPBACK, port=29500)),
        ([HERE, THERE], [], False, Meeting(address=HERE, port=29500, machines=[HERE, THERE])),
        ([HERE], [THERE], False, Meeting(address=HERE, port=29500, machines=[HERE, THERE])),
        ([HERE], [], True, Meeting(address=HERE, port=29500, machines=[])),
    ],
)
def test_ranks_meet_as_near_as_they_are(
    own: list[str], other: list[str], beyond_ray: bool, expected: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_group, "get", lambda answers, **_: answers)
    groups = [worker_group.WorkerGroup.__new__(worker_group.WorkerGroup) for _ in range(2)]
    for group, addresses in zip(groups, (own, other), strict=True):
        group._ranks, group._deadline = [Rank(each) for each in addresses], 1.0
    assert groups[0].rendezvous(groups[1], beyond_ray=beyond_ray) == expected


def listening() -> set[str]:
    """Addresses at which this process listens, in the kernel's hexadecimal order."""
    own = {link.readlink().name for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in own}


def world_of_one_machine() -> tuple[set[str], list[str]]:
    """Addresses at which a rank listens whose world is on one machine; gloo's interfaces here and in wider groups."""
    dist.destroy_process_group()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", distributed.INTERFACE: "eth7"}
    distributed.start("CPU", 10, Meeting(address=LOOPBACK, port=free_port(LOOPBACK)))
    dist.new_group([0])
    found, seen = listening(), [os.environ[distributed.INTERFACE]]
    with patch.dict(
        "torch.distributed._dist2._BACKENDS", gloo=lambda *_: seen.append(os.environ[distributed.INTERFACE])
    ):
        distributed.join_group(Meeting(address=RANK, port=free_port()), 0, 1, 10)
    return found, seen


def test_a_world_of_one_machine_listens_on_loopback() -> None:
    ((found, interfaces),) = run_ranks(1, world_of_one_machine)
    assert found == {"0100007F"}
    assert interfaces == ["lo", "eth7"]


def test_the_address_is_that_of_the_way_there() -> None:
    assert source_address(STRANGER) == OWN
