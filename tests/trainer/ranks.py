"""Runs a function on several gloo ranks, as torchrun would, and returns what each returned.

Ranks are forked from a server that has one thread and only the imports it needs: the tests' own process has Ray's
and others' threads, and a process forked beside them may find its memory half-changed.
"""

import atexit
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

DEADLINE_SECONDS = 240
AFTER_AN_ERROR_SECONDS = 3
"""For other ranks to tell theirs: of two errors of one cause either may come first."""


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` in `world_size` processes that have joined one process group."""
    return _server().run(world_size, function, *arguments)


class RankServer:
    """A process that has called `prepare` and forks ranks; it ends with this one."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._door, there = context.Pipe()
        context.Process(target=_serve, args=(there, prepare)).start()
        there.close()
        atexit.register(self._door.close)  # it ends the server, which Python waits for afterwards

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank's `function(*arguments)` returned; errors of ranks fail the test."""
        self._door.send((world_size, dict(os.environ), function, arguments))
        error, returned = self._door.recv()
        assert not error, error
        return [pickle.loads(each) for each in returned]


@cache
def _server() -> RankServer:
    return RankServer(_import_trainer)


def _import_trainer() -> None:
    import transformers.models.llama.modeling_llama  # noqa: F401 each rank would import it again

    import rlhf_trainer.training.trainer
    import rlhf_trainer.workers.rollout  # noqa: F401


def _serve(door: Connection, prepare: Callable[[], None]) -> None:
    before = dict(os.environ)
    prepare()
    prepared = {name: value for name, value in os.environ.items() if before.get(name) != value}
    while True:
        try:
            world_size, environment, function, arguments = door.recv()
        except EOFError:
            return
        except Exception:  # noqa: BLE001 a function that cannot be imported is told to the test
            door.send((traceback.format_exc(), []))
            continue
        try:
            door.send(("", _fork(world_size, environment | prepared, function, arguments)))
        except AssertionError as error:
            door.send((str(error), []))


def _fork(world: int, environment: dict[str, str], function: Callable[..., Any], arguments: Any) -> list[bytes]:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    doors, processes = [], []
    for rank in range(world):
        here, there = context.Pipe(duplex=False)
        contract = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
        variables = environment | {name: str(value) for name, value in {**contract, "MASTER_PORT": port}.items()}
        processes.append(context.Process(target=_rank, args=(there, variables, function, arguments)))
        processes[-1].start()
        there.close()
        doors.append(here)
    try:
        return _outcomes(doors, processes)
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
            process.join()


def _outcomes(doors: list[Connection], processes: list[Any]) -> list[bytes]:
    """What each rank sent; soon after the first error the test fails with all there are."""
    outcomes: dict[int, bytes] = {}
    errors: list[str] = []
    until = time.monotonic() + DEADLINE_SECONDS
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


def _rank(door: Connection, environment: dict[str, str], function: Callable[..., Any], arguments: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    import torch.distributed as dist

    from rlhf_trainer.training.distributed import start

    try:
        start("CPU", DEADLINE_SECONDS)
        door.send(("", pickle.dumps(function(*arguments))))  # torch would share the memory of a process that ends
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 it is told to the test
        door.send((traceback.format_exc(), b""))
