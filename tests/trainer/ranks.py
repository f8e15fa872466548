"""Runs a function on several gloo ranks, as torchrun would, and returns what each returned."""

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from typing import Any

DEADLINE_SECONDS = 240


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` in `world_size` forked processes that have joined one process group."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, world_size, port, function, arguments, results))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        outcomes = dict(results.get(timeout=DEADLINE_SECONDS) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    errors = [text for ok, text in outcomes.values() if not ok]
    assert not errors, errors[0]
    return [pickle.loads(outcomes[rank][1]) for rank in range(world_size)]


def _rank(rank: int, world: int, port: int, function: Callable[..., Any], arguments: Any, results: Any) -> None:
    import torch.distributed as dist

    from rlhf_trainer.training.distributed import start

    contract = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in contract.items()})
    try:
        start("CPU", DEADLINE_SECONDS)
        results.put(
            (rank, (True, pickle.dumps(function(*arguments))))
        )  # torch would share the memory of a process that ends
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 it is told to the parent
        results.put((rank, (False, traceback.format_exc())))
