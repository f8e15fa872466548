"""The Ray that a run uses: the one it was told, or one of its own that ends with it."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import ray
from ray._private.node import Node

from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run.machine import cores
from rlhf_trainer.run.stopping import Stopped

CONNECT_SECONDS = 10.0
"""How long the Ray of an address may take to accept a connection."""
MONITORS = ("start_api_server", "start_monitor", "start_log_monitor")
"""What starts processes of Ray that a run of its own does without; there is no public way to say so."""


@contextmanager
def ray_session(address: str | None, *, cpu_slots: int) -> Iterator[None]:
    """Connect to `address` and never stop it; without one start an own, isolated Ray and stop it.

    An own Ray has room for `cpu_slots` CPU workers, however many cores there are. EnvironmentProblem if none starts.
    """
    os.environ.setdefault("RAY_ENABLE_ZERO_COPY_TORCH_TENSORS", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # none of ours is one that is started in advance
    os.environ.setdefault("RAY_worker_niceness", "0")  # by itself 15: whatever else runs here would come first
    options = {} if address else {"num_cpus": max(cpu_slots, cores()), "include_dashboard": False}
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # every call's error is raised where it is waited for
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    if address:
        _require_listener(address)
    try:
        with nullcontext() if address else without_monitors():
            ray.init(
                address=address or "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
                **options,
            )
    except SystemExit:  # while it starts, Ray has a handler of SIGTERM that ends the process in this way
        raise Stopped(signal.SIGTERM) from None
    except Exception as error:  # Ray has no common class for what can go wrong here
        raise EnvironmentProblem(f"Ray cannot start: {str(error).strip().splitlines()[0]}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def without_monitors() -> Iterator[None]:
    """A Ray that starts in the block has no process for a dashboard, for more machines, or to bring us its logs.

    Nobody asks them; each takes CPU to start, and Ray waits for the first.
    """
    kept = {name: getattr(Node, name) for name in MONITORS}
    for name in MONITORS:
        setattr(Node, name, lambda _, **__: None)
    try:
        yield
    finally:
        for name, start in kept.items():
            setattr(Node, name, start)


def _require_listener(address: str) -> None:
    """EnvironmentProblem when nothing listens at `[ray://]host:port`: Ray itself would try for many minutes."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not (separator and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise EnvironmentProblem(f"--address or RAY_ADDRESS {address}: no Ray answers there: {error}") from error


def gpus_per_machine() -> tuple[int, ...]:
    """The machines of the connected Ray."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return tuple(int(resources.get("GPU", 0)) for resources in nodes)
