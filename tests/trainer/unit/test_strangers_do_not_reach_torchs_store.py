"""Torch's store is at loopback if the ranks are on one machine, else at one address of rank 0's machine."""

import os
import socket
import struct
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any
from unittest.mock import MagicMock, Mock, patch

import pytest
import torch.distributed as dist

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.controller import worker_group
from rlhf_trainer.controller.call_log import CallLog
from rlhf_trainer.controller.resource_pool import ResourcePool
from rlhf_trainer.controller.slot_process import SlotProcess
from rlhf_trainer.controller.worker_group import WorkerGroup
from rlhf_trainer.errors import CommunicationError
from rlhf_trainer.meeting import LOOPBACK, Meeting
from rlhf_trainer.run.on_ray import RayRuntime
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training import distributed
from tests.trainer.ranks import run_ranks

OWN, STRANGER, RANK = "127.0.0.1", "127.0.0.3", "127.0.0.2"
"""Addresses of the loopback interface stand in for machines."""
BEHIND_NAT = "192.0.2.1"
"""An address for documentation, which no machine has (RFC 5737)."""
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


def test_a_store_is_at_one_address_only() -> None:
    meeting = Meeting(address=RANK, port=free_port())
    store = distributed.open_store(meeting, 0, 2, SECONDS)
    assert is_heard(meeting, STRANGER)
    assert not is_heard(Meeting(address=OWN, port=meeting.port), OWN)
    assert store.list_keys() == []


def test_it_is_at_all_if_the_machine_lacks_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Meeting(address=BEHIND_NAT, port=free_port()).listen() is None
    monkeypatch.setattr(Meeting, "listen", lambda _: None)  # as above, for an address that answers
    meeting = Meeting(address=RANK, port=free_port())
    store = distributed.open_store(meeting, 0, 2, SECONDS)
    assert is_heard(Meeting(address=OWN, port=meeting.port), OWN)
    assert store.list_keys() == []


def test_it_is_at_an_address_of_ipv6() -> None:
    meeting = Meeting(address="::1", port=free_port("::1"))
    store = distributed.open_store(meeting, 0, 2, SECONDS)
    assert is_heard(meeting, "::1")
    assert store.list_keys() == []


def test_a_taken_port_is_an_error_of_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "")
    for name in ("pool", "rank"):
        monkeypatch.setattr(recorder, name, getattr(recorder, name))
    process = SlotProcess(pool="train", path=[])
    with socket.create_server((LOOPBACK, 0)) as taken:
        meeting = Meeting(address=LOOPBACK, port=taken.getsockname()[1])
        with pytest.raises(CommunicationError, match=r"^join on rank 3: OSError: .*Address already in use"):
            process.join({"RANK": "3"}, partial(distributed.open_store, meeting, 0, 2, SECONDS))


def test_a_rank_that_comes_first_waits_for_rank_0() -> None:
    meeting, stores = Meeting(address=RANK, port=free_port()), []
    late = Timer(0.1, lambda: stores.append(distributed.open_store(meeting, 0, 2, SECONDS)))
    late.start()
    meeting.wait_for_listener()
    assert is_heard(meeting, STRANGER)
    late.join()
    assert stores[0].list_keys() == []


class Rank:
    """A process of a slot, as Ray would give a handle to it."""

    def __init__(self) -> None:
        self.rendezvous, self.join = self, self
        self.given: list[Any] = []

    def remote(self, *given: Any) -> object:
        """The answer of `rendezvous`; of `join`, what it was given."""
        self.given = [*given]
        return HERE, 29500


HERE = "10.0.0.1"


def group_of(slots_per_machine: list[int], monkeypatch: pytest.MonkeyPatch) -> WorkerGroup:
    """A group whose processes only remember what they are asked."""
    monkeypatch.setattr(worker_group, "get", lambda answers, **_: answers)
    monkeypatch.setattr(WorkerGroup, "_started", lambda _: [Rank() for _ in range(sum(slots_per_machine))])
    pool = ResourcePool(slots_per_machine, name="train", device="CPU")
    monkeypatch.setattr(pool, "slots", lambda: [(None, rank) for rank in range(pool.size)])
    return WorkerGroup(pool, start=lambda meeting: meeting, environment={}, log=CallLog(), deadline=1.0)


@pytest.mark.parametrize(("slots_per_machine", "address"), [([2], LOOPBACK), ([1, 1], HERE), ([1], LOOPBACK)])
def test_a_pool_meets_as_near_as_it_is(
    slots_per_machine: list[int], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(slots_per_machine, monkeypatch)
    group.build({})
    met = [rank.given[1]() for rank in group._ranks]
    assert met == [Meeting(address=address, port=29500)] * sum(slots_per_machine)


@pytest.mark.parametrize(
    ("hosts", "in_ray", "address"),
    [(["a"], True, LOOPBACK), (["a", "b"], True, HERE), (["b"], True, HERE), (["a"], False, HERE)],
)
def test_two_pools_meet_as_near_as_they_are(
    hosts: list[str], in_ray: bool, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of([1], monkeypatch)
    group.hosts = ["a"]
    runtime, actor = Mock(spec=RayRuntime), Mock()
    runtime.configure_mock(
        _groups={"train": group},
        _home="train",
        _deadline=1.0,
        _log=MagicMock(),
        _handles={"actor": actor, "rollout": Mock()},
        _placed=Mock(sizes={"actor": ParallelSizes(data=1)}),
    )
    RayRuntime._span_pools(runtime, hosts, ParallelSizes(data=len(hosts)), in_ray=in_ray)
    assert actor.call.call_args.kwargs["span"].meeting == Meeting(address=address, port=29500)


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
        distributed.join_group(Meeting(address=RANK, port=free_port()), 0, 1, 10, distributed.AbortSwitch())
    return found, seen


def test_a_world_of_one_machine_listens_on_loopback() -> None:
    ((found, interfaces),) = run_ranks(1, world_of_one_machine)
    assert found == {"0100007F"}
    assert interfaces == ["lo", "eth7"]
