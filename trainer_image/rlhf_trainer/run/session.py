"""Ray session of a run: a running Ray at a given address, or our own Ray, which ends with the run."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import ray
from ray._private import services, utils, worker
from ray._private.node import Node
from ray._raylet import (  # type: ignore[attr-defined]  # compiled, without types
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    persist_port,
)

from rlhf_api.tables import read_table
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run.machine import cores
from rlhf_trainer.run.stopping import SIGNALS, Stopped

VARIABLES = read_table(__package__, "variables.yaml", dict[str, dict[str, str]])
"""Environment variables of a run's Ray (`ray`), and of its processes by their device."""
START_SECONDS = 180
"""Seconds that the processes of our own Ray may take to start; Ray itself would wait for 30."""
MONITORS = ("start_api_server", "start_monitor", "start_log_monitor")
"""Ray's functions that start processes which our own Ray does without; there is no public option for this."""

UNUSED_PORTS = (METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME, DASHBOARD_AGENT_LISTEN_PORT_NAME)
"""Ports of Ray's dashboard agent, which serve nothing here."""


@contextmanager
def ray_session(address: str | None, *, cpu_slots: int) -> Iterator[None]:
    """Connect to the Ray at `address` for the block; without an address start an isolated Ray, and stop it at the end.

    Our own Ray has room for `cpu_slots` CPU workers, however many cores there are. EnvironmentProblem if none starts.
    """
    os.environ |= {name: value for name, value in VARIABLES["ray"].items() if name not in os.environ}
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    options |= {} if address else {"num_cpus": max(cpu_slots, cores()), "include_dashboard": False}
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    if address:
        _require_listener(address)
    with socket.socket() as reserved:  # stays open until the end, as Ray's agent may bind its port at any time
        try:
            with nullcontext() if address else started_by_us(reserved):
                ray.init(address=address or "local", **options)
        except SystemExit:  # while it starts, Ray has a handler of SIGTERM that ends the process in this way
            raise Stopped(signal.SIGTERM) from None
        except Exception as error:  # Ray has no common class for what can go wrong here
            raise EnvironmentProblem(f"Ray cannot start: {str(error).strip().splitlines()[0]}") from error
        before = signal.signal(signal.SIGCHLD, on_the_end_of_a_child)
        try:
            yield
        finally:
            signal.signal(signal.SIGCHLD, before)
            if not how_ray_ended():  # `shutdown` would wait a minute for ended processes
                ray.shutdown()


def _await_node(find: Callable[..., object], *arguments: object) -> object:
    """Return `find(*arguments)` as soon as it raises no RuntimeError.

    Raises ChildProcessError if a process of this Ray has ended, TimeoutError after START_SECONDS.
    """
    for _ in range(START_SECONDS):
        with suppress(RuntimeError):
            return find(*arguments)
        if ended := [process for process in OwnProcess.started if process.poll() is not None]:
            raise ChildProcessError(f"its {ended[0].program} ended with code {ended[0].returncode}")
        time.sleep(1.0)
    raise TimeoutError("the machine is too busy; run again when it is less so, or name a running Ray by --address")


def how_ray_ended() -> str:
    """Return a sentence about a process of our own Ray that has ended early; empty if none has."""
    for name, process in own_processes():
        if (code := process.poll()) is not None and not process.was_killed:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return f"Ray has ended: its {name} {how}"
    return ""


def on_the_end_of_a_child(*_signal: object) -> None:
    """Handle SIGCHLD: if a process of our own Ray has ended early, kill the others and raise EnvironmentProblem.

    Ray itself would try for a minute to reach the lost process, and then end this controller's process.
    """
    if problem := how_ray_ended():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for _, process in own_processes():
            process.kill()
        raise EnvironmentProblem(problem)


def own_processes() -> list[tuple[str, OwnProcess]]:
    """Return (name, process) for each process of our own Ray; empty for a Ray at a given address."""
    node = worker._global_node  # noqa: SLF001 there is no public way
    found = ((name, info.process) for name, infos in (node.all_processes if node else {}).items() for info in infos)
    return [(name, process) for name, process in found if isinstance(process, OwnProcess)]


class OwnProcess(subprocess.Popen[bytes]):
    """Process of our own Ray, which blocks the signals that stop a run, as do all its children.

    Terminals and `timeout` send the signals to a process group, service managers to every process; but a run that stops
    needs Ray for its checkpoint. A shell waits until this program ends, and then kills the process. Otherwise Ray's
    agents would try for a minute to reach Ray processes that have ended.
    """

    started: ClassVar[list[OwnProcess]] = []
    """Processes of our own Ray that is starting or started last."""
    was_killed = False

    def __init__(
        self, command: Sequence[str], *, preexec_fn: Callable[[], None], **options: Any
    ) -> None:  # options: those of Popen
        def prepare() -> None:
            preexec_fn()
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

        super().__init__(command, preexec_fn=prepare, start_new_session=True, **options)
        self.program = Path(command[0]).name
        self.started.append(self)
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", "read -r end; kill -s KILL -- -$0", str(self.pid)],
            stdin=subprocess.PIPE,  # its other end closes when this program ends
            stderr=subprocess.DEVNULL,
            preexec_fn=partial(signal.pthread_sigmask, signal.SIG_BLOCK, SIGNALS),  # noqa: PLW1509 it takes no lock
            start_new_session=True,
        )

    def kill(self) -> None:
        """Kill the process and all processes that it has started, and end its watcher."""
        self._watcher.kill()
        self._watcher.wait()
        if self.poll() is None:
            self.was_killed = True
            os.killpg(self.pid, signal.SIGKILL)

    terminate = kill  # the process blocks SIGTERM


@contextmanager
def started_by_us(reserved: socket.socket) -> Iterator[None]:
    """Patch Ray in the block: a Ray that starts there consists of `OwnProcess`es and does not show its logs.

    This Ray starts no dashboard, autoscaler monitor or log monitor: a run needs none, each takes CPU to start, and Ray
    waits for the dashboard. The raylet waits for its agents, which are Python programs, to write their ports to files,
    and ends itself after 15 s. So the ports are written before the agents start. The socket `reserved` keeps the port
    of the one agent that serves (the runtime environment's).
    """
    start_raylet = Node.start_raylet
    OwnProcess.started.clear()

    def start_with_ports(node: Any, *arguments: Any, **options: Any) -> None:
        node._ray_params.runtime_env_agent_port = port  # noqa: SLF001
        for name, number in {**dict.fromkeys(UNUSED_PORTS, -1), RUNTIME_ENV_AGENT_PORT_NAME: port}.items():
            persist_port(node._session_dir, node._node_id, name, number)  # noqa: SLF001
        start_raylet(node, *arguments, **options)

    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the agent can bind the port beside us
    reserved.bind(("", 0))
    port = reserved.getsockname()[1]
    changes: dict[tuple[Any, str], Any] = {(Node, name): lambda _, **__: None for name in MONITORS}
    changes[Node, "start_raylet"] = start_with_ports
    changes[utils, "get_dashboard_dependency_error"] = lambda: ImportError("this Ray has no dashboard")
    changes[services, "ConsolePopen"] = OwnProcess
    changes[services, "get_node"] = partial(_await_node, services.get_node)
    changes[worker, "listen_error_messages"] = lambda *_, **__: None
    with ExitStack() as stack:
        for (owner, name), change in changes.items():
            stack.enter_context(patch.object(owner, name, change))
        yield


def _require_listener(address: str) -> None:
    """Raise EnvironmentProblem if nothing listens at `[ray://]host:port`: Ray itself would try for many minutes."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not (separator and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=10.0).close()
    except (OSError, OverflowError) as error:
        raise EnvironmentProblem(f"--address or RAY_ADDRESS {address}: no Ray answers there: {error}") from error


def gpus_per_machine() -> tuple[int, ...]:
    """Return the number of GPUs of each machine of the connected Ray."""
    return tuple(int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"])
