"""A backend of torch.distributed on CPUs that behaves as NCCL does when a rank is lost; gloo carries its bytes.

    a collective       returns at once; `wait` blocks, as the first read of a result does on a GPU
    a rank that dies   raises nothing: the others wait
    `abort`            ends what is waited for, without an error and with rubbish as results; what comes later raises
    the watchdog       ends the process (SIGABRT), or the group where torch's variable says so when it is made, if a
                       collective exceeds its timeout or, with `sees_losses` (a network), has lost a rank

`install` puts it where the product takes gloo. With this folder in PYTHONPATH torch itself calls it, by its entry point
for backends of others.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _dist2

NAME = "nccl_like"
Base: Any = dist.distributed_c10d.Work
LOOK_SECONDS = 0.2
SEES_LOSSES = False
LOG: Path | None = None
ON_ERROR, GROUP_ENDS = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"
FOREVER = timedelta(days=1)
COLLECTIVES = (
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "allgather", "allreduce"),
    *("allreduce_coalesced", "alltoall", "barrier", "broadcast", "gather", "recv", "reduce", "reduce_scatter"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "scatter", "send"),
)


class Work(Base):  # type: ignore[misc]
    """A collective of the carrier, under way or ended."""

    def __init__(self, group: NcclLikeGroup, name: str, carried: Any) -> None:
        super().__init__()
        self.group, self.name, self.began, self._carried = group, name, time.monotonic(), carried
        self._has_ended = self.has_lost = False

    def is_completed(self) -> bool:
        """Not if the carrier has given up: on NCCL nobody would know."""
        if not self._has_ended and self._carried.is_completed():
            with suppress(RuntimeError):  # that of the carrier; or nobody knows of a message before it is waited for
                self._carried.get_future().value()
                self._has_ended = True
        return self._has_ended

    def is_success(self) -> bool:
        return self.is_completed()

    def wait(self, timeout: timedelta = FOREVER) -> bool:  # noqa: ARG002 the watchdog has the group's
        try:
            self._carried.wait()
            self._has_ended = True
        except RuntimeError:
            self.has_lost = True
            self.group.aborted.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        return self._carried.get_future()

    def result(self) -> Any:
        return self._carried.result()


class NcclLikeGroup(dist.ProcessGroup):
    """A process group whose collectives are gloo's, with NCCL's ends."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stubs know the other of two
        here = torch.device("cpu")
        self._carrier = _dist2._BACKENDS["gloo"](store, rank, size, timeout, here)
        self._gloo: Any = self._carrier._get_backend(here)
        self._register_backend(here, dist.ProcessGroup.BackendType.GLOO, self._gloo)  # torch sets timeouts there
        self.aborted, self.ends_alone = threading.Event(), os.environ.get(ON_ERROR) == GROUP_ENDS
        self._running: list[Work] = []
        self._log: Path | None = None
        if LOG:
            if rank == 0:
                store.set("of all", uuid.uuid4().hex)
            self._log = LOG / f"{store.get('of all').decode()}-{rank}"
        threading.Thread(target=watch, args=[weakref.ref(self)], name="watchdog", daemon=True).start()

    def getBackendName(self) -> str:  # noqa: N802 torch's name
        return NAME

    def abort(self) -> None:
        """End the group's collectives: who waits for one goes on."""
        self.aborted.set()
        self._gloo.abort()

    def start(self, name: str, *given: Any, **named: Any) -> Work:
        if self.aborted.is_set():
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank()}.")
        if self._log:
            with self._log.open("a") as file:
                file.write(f"{name} {said_of(name, given)}\n")
        work = Work(self, name, getattr(self._carrier, name)(*given, **named))
        self._running = [each for each in self._running if not each.is_completed()] + [work]
        return work

    def late(self) -> Work | None:
        """The first collective that takes longer than it may."""
        limit = self._gloo.options._timeout.total_seconds()
        running = [each for each in self._running if not each.is_completed()]
        late = (each for each in running if time.monotonic() - each.began > limit or (SEES_LOSSES and each.has_lost))
        return next(late, None)


def said_of(name: str, given: Sequence[Any]) -> str:
    """What all ranks of a collective give alike; of a message the other rank and its elements."""
    if not given:
        return ""
    tensors = given[0] if isinstance(given[0], list) else [given[0]]
    if name in ("send", "recv"):
        return f"{given[1]} {tensors[0].numel()} {tensors[0].dtype}"
    if not isinstance(tensors[0], torch.Tensor) or name.startswith("all_to_all"):
        return ""
    return f"{[each.numel() for each in tensors]} {tensors[0].dtype}"


def watch(group: weakref.ref[NcclLikeGroup]) -> None:
    """The watchdog of a group, which ends with the group."""
    while (here := group()) and not here.aborted.is_set():
        if late := here.late():
            os.write(2, f"[Rank {here.rank()}] Watchdog caught collective operation timeout: {late.name}\n".encode())
            if not here.ends_alone:
                os.abort()
            here.abort()
        del here
        time.sleep(LOOK_SECONDS)


def started(name: str) -> Callable[..., Work]:
    return lambda group, *given, **named: group.start(name, *given, **named)


for each in COLLECTIVES:
    setattr(NcclLikeGroup, each, started(each))


def make(store: Any, rank: int, world_size: int, timeout: timedelta, *_: object) -> NcclLikeGroup:
    return NcclLikeGroup(store, rank, world_size, timeout)


def install(*, sees_losses: bool = False, log: Path | None = None) -> None:
    """Have this process join worlds of the backend where it asks for gloo; call it once.

    log: folder in which each rank of each group writes its collectives to `<group>-<rank>`.
    """
    global SEES_LOSSES, LOG
    SEES_LOSSES, LOG = sees_losses, log
    dist.Backend.register_backend(NAME, make, devices=["cpu"])
    _dist2.register_backend(NAME, make)  # type: ignore[arg-type]
    join = dist.init_process_group
    dist.init_process_group = lambda backend, **given: join(NAME if backend == "gloo" else backend, **given)
