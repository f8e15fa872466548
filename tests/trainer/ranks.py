"""Runs a function on several gloo ranks, as torchrun would, and returns what each returned.

Ranks are forked from a server that has one thread and only the imports it needs: the tests' own process has Ray's
and others' threads, and a process forked beside them may find its memory half-changed.
"""

import atexit
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

from rlhf_trainer.collector import collector_off
from tests.patience import PATIENCE_SECONDS

FORK_SERVER = multiprocessing.get_context("forkserver")
"""Forks what has to have imported the trainer, and has no threads: the server of ranks, and workers without Ray."""
FORK_SERVER.set_forkserver_preload(["tests.trainer.preloaded"])
IDLE_SECONDS, MAX_KEPT_CALLS = 10, 60
"""When kept ranks end: each of their gloo groups has a thread that wakes 100 times a second, also when it is idle."""
AFTER_AN_ERROR_SECONDS = 3
"""For other ranks to tell theirs: of two errors of one cause either may come first."""


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` in `world_size` new processes that have joined one process group."""
    return _server().run(world_size, function, *arguments)


def run_kept_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """As `run_ranks`, in processes that stay for the next call: what torch prepares once is prepared once.

    What the function changes in a module stays too.
    """
    return _server().run(world_size, function, *arguments, keep=True)


class RankServer:
    """A process that has called `prepare` and forks ranks; it ends with this one."""

    def __init__(self, prepare: Callable[[], None], context: Any = None) -> None:
        """context: of multiprocessing; without one the process has imported nothing when it calls `prepare`."""
        context = context or multiprocessing.get_context("spawn")
        self._door, there = context.Pipe()
        context.Process(target=_serve, args=(there, prepare)).start()
        there.close()
        atexit.register(self._door.close)  # it ends the server, which Python waits for afterwards

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any, keep: bool = False) -> list[Any]:
        """What each rank's `function(*arguments)` returned; errors of ranks fail the test."""
        self._door.send((world_size, keep, dict(os.environ), function, arguments))
        error, returned = self._door.recv()
        assert not error, error
        return [pickle.loads(each) for each in returned]


@cache
def _server() -> RankServer:
    return RankServer(import_trainer, FORK_SERVER)


def import_trainer() -> None:
    """What each rank would import and make again."""
    import datasets  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import rlhf_trainer.training.trainer
    import rlhf_trainer.workers.rollout  # noqa: F401
    from rlhf_trainer.training import sharding

    get_checkpoint_conversion_mapping("llama")
    sharding.MAX_SINGLE_UNIT_BYTES = 0  # tiny models too are gathered layer by layer, as large ones are


def _serve(door: Connection, prepare: Callable[[], None]) -> None:
    before = dict(os.environ)
    with collector_off():  # it freezes, too: else each rank's first collection touches, and so copies, all of it
        prepare()
    gc.set_threshold(50_000, 20, 50)  # and later ones find little
    prepared = {name: value for name, value in os.environ.items() if before.get(name) != value}
    kept: dict[int, _Ranks] = {}
    while True:
        door.poll(IDLE_SECONDS)
        for size in [size for size, ranks in kept.items() if ranks.idle_seconds() >= IDLE_SECONDS]:
            kept.pop(size).end()
        try:
            world_size, keep, environment, function, arguments = door.recv()
        except EOFError:
            break
        except Exception:  # noqa: BLE001 a function that cannot be imported is told to the test
            door.send((traceback.format_exc(), []))
            continue
        ranks = kept.pop(world_size, None) if keep else None
        if ranks is None:
            doors_of_kept = [each for others in kept.values() for each in others.doors]
            ranks = _Ranks(world_size, [door, *doors_of_kept])
        failed = ""
        returned: list[bytes] = []
        try:
            returned = ranks.call(environment | prepared, function, arguments)
        except AssertionError as error:
            failed = str(error)
        door.send((failed, returned))
        if keep and not failed and ranks.calls < MAX_KEPT_CALLS:
            kept[world_size] = ranks
        else:
            ranks.end()
    for ranks in kept.values():
        ranks.end()


class _Ranks:
    """Forked processes that join one process group when they are first called."""

    def __init__(self, world: int, inherited: Sequence[Connection]) -> None:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("fork")
        self.calls, self._called = 0, time.monotonic()
        self.doors: list[Connection] = []
        self._processes = []
        for rank in range(world):
            here, there = context.Pipe()
            self.doors.append(here)
            contract = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
            variables = {name: str(value) for name, value in {**contract, "MASTER_PORT": port}.items()}
            process = context.Process(target=_rank, args=(there, variables, [*inherited, *self.doors]))
            process.start()
            self._processes.append(process)
            there.close()

    def call(self, environment: dict[str, str], function: Callable[..., Any], arguments: Any) -> list[bytes]:
        """What each rank returned, pickled."""
        letter = pickle.dumps((environment, function, arguments))
        for door in self.doors:
            with suppress(BrokenPipeError):  # how a rank ended is told below
                door.send_bytes(letter)
        try:
            return _outcomes(self.doors, self._processes)
        finally:
            self.calls, self._called = self.calls + 1, time.monotonic()

    def idle_seconds(self) -> float:
        return time.monotonic() - self._called

    def end(self) -> None:
        for door in self.doors:
            door.close()
        for process in self._processes:
            process.join(timeout=10)
            process.kill()
            process.join()


def _outcomes(doors: list[Connection], processes: list[Any]) -> list[bytes]:
    """What each rank sent; soon after the first error the test fails with all there are."""
    outcomes: dict[int, bytes] = {}
    errors: list[str] = []
    until = time.monotonic() + PATIENCE_SECONDS
    while silent := [rank for rank in range(len(doors)) if rank not in outcomes]:
        ready = wait([doors[rank] for rank in silent], until - time.monotonic())
        if not ready:
            errors.append(f"ranks {silent} returned nothing")
            break
        for rank in silent:
            if doors[rank] not in ready:
                continue
            try:
                error, outcomes[rank] = doors[rank].recv()
            except EOFError:
                processes[rank].join()
                error, outcomes[rank] = f"rank {rank} ended with {_end(processes[rank].exitcode)}", b""
            if error:
                errors.append(error)
                until = min(until, time.monotonic() + AFTER_AN_ERROR_SECONDS)
    for process in processes if errors else []:
        process.kill()
    assert not errors, "\n".join(errors)
    return [outcomes[rank] for rank in range(len(doors))]


def _end(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _rank(door: Connection, contract: dict[str, str], inherited: Sequence[Connection]) -> None:
    for each in inherited:
        each.close()
    import torch.distributed as dist

    from rlhf_trainer.telemetry import recorder
    from rlhf_trainer.training.distributed import start

    while True:
        try:
            letter = door.recv_bytes()
        except EOFError:
            return
        try:
            environment, function, arguments = pickle.loads(letter)
            os.environ.clear()
            os.environ.update(environment | contract)
            if not dist.is_initialized():
                start("CPU", PATIENCE_SECONDS)
            recorder.drain()  # what an earlier call has measured
            door.send(("", pickle.dumps(function(*arguments))))  # torch would share the memory of a process that ends
        except BaseException:  # noqa: BLE001 it is told to the test
            door.send((traceback.format_exc(), b""))
            return  # others that wait for this rank learn of it
