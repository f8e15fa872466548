"""Supervision of processes that run code of the user's or of a model: a guard, limits, and a sandbox.

A `UserProcess` is the trainer's end of a socket; at its other end a program calls `guard(serve)`. The guard forks the
process that serves, and runs no code of the user's. It kills that process and all its descendants when the trainer
closes the socket or is killed, or when the process ends, and then exits as the process did. So nothing outlives a run,
not even an endless loop in C. Each of these processes imports this module, so its own imports are quick. The socket
carries JSON values, as a sandbox's socket does.
"""

import ctypes
import errno
import math
import os
import platform
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from rlhf_api.sandbox_server import receive, send

GUARD_SECONDS = 10.0
"""Seconds that the trainer waits for a guard process to kill the user code's process and all its descendants."""
REAP_MILLISECONDS = 1000
"""Interval in milliseconds at which a guard process reaps ended descendants of the user code's process."""
SIGNALS = {int(each): f" ({each.name})" for each in signal.Signals}
"""Number of a signal -> name in brackets, for error messages; most real-time signals have none."""
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
MEBIBYTE = 2**20
WAIT_FACTOR = 5.0
JUDGEMENT = struct.Struct("16sd")
"""Message of a child process on a judged item: secret key, score. The key tells it from bytes that a response wrote."""
Serve = Callable[[socket.socket, str], None]
"""Function (socket, entry points with commas between) that answers calls until the trainer closes the socket."""
Item = TypeVar("Item")
Kind = Literal["raised", "ended", "late", "lost", "no sandbox"]
"""Cause of a failure: the user's code raised or gave a wrong value, ended its process or was too slow; its sandbox was
lost; no sandbox was free.
"""


@dataclass(frozen=True)
class AnswerFailure:
    """Failure of a process of user code to answer."""

    what: str
    """Sentence on the failure without its subject, such as `did not return within 5 s`."""
    index: int | None = None
    """Index of the sample at which the user code failed, if known."""
    kind: Kind = "raised"


class UserProcess:
    """The guarded process of the user's entry points. It starts at once; after its end the next call starts another."""

    def __init__(self, program: str, entrypoints: str, *, subject: str = "") -> None:
        """Start the process by `python -m program`, which calls `guard`; subject: begins the error of a slow import."""
        self._command, self._subject = [sys.executable, "-m", program], subject
        self._entrypoints, self._is_imported = entrypoints, False
        self._start()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair()
        without_gpus = {"CUDA_VISIBLE_DEVICES": ""}  # the trainer needs all memory of its GPUs
        with theirs:
            self._guard: subprocess.Popen[bytes] | None = subprocess.Popen(
                [*self._command, str(theirs.fileno()), self._entrypoints],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **without_gpus},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        """Whether a process was started and neither closed nor found dead."""
        return self._guard is not None

    def await_import(self) -> AnswerFailure | None:
        """Wait until the entry points are imported, or return the failure. Starts a process if needed."""
        if self._is_imported:
            return None
        if self._guard is None:
            self._start()
        answer = self._exchange(None, seconds=300.0, doing=f"{self._subject}did not finish its import")
        if isinstance(answer, AnswerFailure):
            return answer
        if isinstance(answer, dict) and answer["problem"]:
            self.close()
            return AnswerFailure(answer["problem"])
        self._is_imported = True
        return None

    def call(self, value: Any, *, seconds: float) -> Any:
        """Send the process a value, return its answer or the failure; `seconds` without an answer end the process."""
        return self.await_import() or self._exchange(value, seconds=seconds, doing="did not return")

    def hand(self, value: Any, theirs: socket.socket) -> AnswerFailure | None:
        """Send the process a value and then the open socket `theirs`; returns the failure if the process has failed."""
        if failure := self.await_import():
            return failure
        try:
            send(self._channel, value)
            socket.send_fds(self._channel, [b"\0"], [theirs.fileno()])
        except OSError:
            return self._ended()
        return None

    def close(self) -> None:
        """End the process and all its descendants: the guard kills them when its socket is closed."""
        guard, self._guard, self._is_imported = self._guard, None, False
        if guard is None:
            return
        self._channel.close()
        try:
            guard.wait(GUARD_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(guard.pid, signal.SIGKILL)
            guard.wait()

    def _exchange(self, value: Any, *, seconds: float, doing: str) -> Any:
        try:
            self._channel.settimeout(seconds)
            if value is not None:
                send(self._channel, value)
            return receive(self._channel)
        except TimeoutError:
            self.close()
            return AnswerFailure(f"{doing} within {seconds:g} s")
        except (OSError, EOFError):
            return self._ended()

    def _ended(self) -> AnswerFailure:
        """Clean up after a process that has closed its socket; return the failure that says how the process ended."""
        assert self._guard is not None, "only a running process ends"
        try:
            failure = AnswerFailure(ending_of(self._guard.wait(GUARD_SECONDS)))
        except subprocess.TimeoutExpired:
            failure = AnswerFailure("closed its connection to the trainer")
        self.close()
        return failure


def ending_of(code: int) -> str:
    """Return in words how a process ended, by its exit code."""
    if code < 0:
        return f"was ended by signal {-code}{SIGNALS.get(-code, '')}"
    return f"ended its process with exit code {code}"


def guard(serve: Serve) -> None:
    """Call `serve` in a process that is guarded (`run_guarded`); never returns. sys.argv: socket, entry points."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    run_guarded(lambda: serve(channel, sys.argv[2]), channel)


def run_guarded(run: Callable[[], None], channel: socket.socket) -> None:
    """Call `run` in a forked process until it ends or `channel` is closed; then end all descendants; never returns."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans among the descendants become children of this process
    server = os.fork()
    if server == 0:
        end_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by programs that the server starts
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        run()
        os._exit(0)
    status = _await_end(server, channel)
    _end_descendants()
    _end_as(os.waitstatus_to_exitcode(status))


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, *values: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.prctl(option, *values, *[0] * (4 - len(values))) != 0
    if refused and option not in (PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG):  # some sandboxed runtimes refuse these
        raise OSError(ctypes.get_errno(), f"this system refuses prctl({option})")


def _await_end(server: int, channel: socket.socket) -> int:
    """Wait until the trainer closes its socket, and return 0, or until the process `server` ends: return its status."""
    events = select.poll()
    events.register(channel, 0)  # only POLLHUP
    events.register(os.pidfd_open(server), select.POLLIN)
    while True:
        is_closed = any(kind & select.POLLHUP for _, kind in events.poll(REAP_MILLISECONDS))
        reaped = dict(_reap())
        if server in reaped or is_closed:
            return reaped.get(server, 0)


def _reap() -> Iterator[tuple[int, int]]:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def _end_descendants() -> None:
    """Kill and reap every descendant; orphans of a killed one become children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with suppress(ChildProcessError):
        while True:
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def _end_as(code: int) -> None:
    """End this process with an exit code; a negative code means that it ends by that signal."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


@dataclass(frozen=True, kw_only=True)
class ChildLimits:
    """Limits of the judgement of one item, such as a response, in a child process."""

    seconds: float
    """CPU seconds; the wall time of the judgement may be `WAIT_FACTOR` times as long."""
    memory: int
    """Most bytes of the child's address space beyond those of its parent."""
    is_sandboxed: bool = False
    """Whether each judged item gets a child process of its own, in a sandbox; False: one child judges many items."""


def judge_in_children(
    judge: Callable[[Item], float], items: Sequence[Item], limits: ChildLimits, *, until: float
) -> list[float | None]:
    """Return judge(item) for each item; 0 if the judgement raises, NaN if it ends its process or exceeds the limits.

    None for the items that are left at `until`, a time of the monotonic clock. Children are forked, so they have the
    caller's imports. Meanwhile other threads of the caller may do nothing but call this function, too.
    """
    found: list[float | None] = []
    longest = WAIT_FACTOR * limits.seconds
    child: _Child | None = None
    try:
        for place in range(len(items)):
            if (left := until - time.monotonic()) <= 0:
                break
            child = child or _Child(judge, items[place : place + 1] if limits.is_sandboxed else items[place:], limits)
            number = child.answer(min(longest, left))
            if number is None and left < longest and time.monotonic() >= until:
                break
            found.append(math.nan if number is None else number)
            if number is None or limits.is_sandboxed:
                child.end()
                child = None
    finally:
        if child:
            child.end()
    return found + [None] * (len(items) - len(found))


class _Child:
    """Forked child process that judges items one after the other."""

    def __init__(self, judge: Callable[[Item], float], items: Sequence[Item], limits: ChildLimits) -> None:
        self._answers, theirs = os.pipe()
        self._key = os.urandom(JUDGEMENT.size - struct.calcsize("d"))
        self._process = os.fork()
        if self._process == 0:
            try:
                _judge_all(judge, items, limits, answers=theirs, key=self._key)
            finally:
                os._exit(0)
        os.close(theirs)

    def answer(self, seconds: float) -> float | None:
        """Return the child's next judgement; None if it is late, or the child has ended or sends other bytes."""
        events = select.poll()
        events.register(self._answers, select.POLLIN)
        if not events.poll(1000 * seconds):
            return None
        answer = os.read(self._answers, JUDGEMENT.size)
        key, number = JUDGEMENT.unpack(answer) if len(answer) == JUDGEMENT.size else (b"", 0.0)
        return float(number) if key == self._key else None

    def end(self) -> None:
        os.close(self._answers)
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)


def _judge_all(
    judge: Callable[[Item], float], items: Sequence[Item], limits: ChildLimits, *, answers: int, key: bytes
) -> None:
    """Write each item's score to the pipe `answers`; a sandboxed child has only this pipe and standard files open."""
    memory = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + limits.memory
    bounds = {resource.RLIMIT_AS: memory, resource.RLIMIT_CORE: 0}
    if limits.is_sandboxed:
        os.closerange(3, answers)
        os.closerange(answers + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        bounds |= {resource.RLIMIT_CPU: int(limits.seconds) + 1, resource.RLIMIT_FSIZE: 0}
    for kind, limit in bounds.items():
        resource.setrlimit(kind, (limit, limit))
    if limits.is_sandboxed:
        enter_sandbox()
    for item in items:
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)  # SIGPROF ends the process
        try:
            number = float(judge(item))
        except Exception:  # noqa: BLE001 a response that cannot be judged is wrong
            number = 0.0
        os.write(answers, JUDGEMENT.pack(key, number))


SECCOMP_MODE_FILTER, AUDIT_ARCH_X86_64 = 2, 0xC000003E
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
"""Instructions of classic BPF: load 32 bits, jump if equal, jump if any bit is set, return."""
KILL, ALLOW, REFUSE, NO_SUCH_CALL = 0x80000000, 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
"""Offsets of a system call's number, its architecture and its arguments in struct seccomp_data."""
OPEN, OPENAT, CLONE, CLONE3 = 2, 257, 56, 435
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CLONE_THREAD = 0x10000
ALLOWED_CALLS = (
    *(0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),  # read, write, close, stat, poll, lseek, mmap, brk
    *(13, 14, 15, 16, 17, 19, 20, 21),  # handlers of signals, ioctl, pread, readv, access
    *(22, 23, 24, 25, 27, 28, 32, 33, 35, 36, 37, 38, 39, 60, 63, 72, 79, 89),  # pipe, select, dup, sleep, timers, exit
    *(95, 96, 97, 98, 99, 100, 102, 104, 107, 108, 110, 131, 158, 186, 201, 202),  # times, own ids, futex
    *(204, 217, 218, 219, 228, 229, 230, 231, 262, 267, 269, 270, 271, 273),  # getdents64, clocks, newfstatat, poll
    *(292, 293, 318, 324, 332, 334, 439),  # getrandom, membarrier, statx, rseq, faccessat2
)
"""Numbers of the x86-64 system calls that the sandbox allows, because Python needs them to compute."""
BpfInstruction = tuple[int, int, int, int]
"""One BPF instruction (struct sock_filter): operation, instructions to skip if its test is true and if false, value."""


def require_sandbox() -> None:
    """Raise OSError unless the processor is x86-64, whose system calls the filter knows by number."""
    if platform.machine() != "x86_64":
        raise OSError(errno.ENOSYS, f"code is only run on x86_64, and this is {platform.machine()}")


def enter_sandbox() -> None:
    """Have the kernel refuse this process the network, files to write and other processes; OSError if it cannot.

    A seccomp filter does so (Linux's seccomp(2)): it needs no privilege and cannot be taken back. A system call that is
    not listed fails as not permitted (EPERM).
    """
    steps: list[BpfInstruction] = [
        *((LOAD, 0, 0, ARCHITECTURE_AT), (EQUAL, 1, 0, AUDIT_ARCH_X86_64), (RETURN, 0, 0, KILL)),
        *((LOAD, 0, 0, NUMBER_AT), (EQUAL, 0, 1, CLONE3)),
        (RETURN, 0, 0, NO_SUCH_CALL),  # C libraries then call clone, whose flags a filter can read
        *_by_bits(CLONE, 0, CLONE_THREAD, ALLOW, REFUSE),
        *_by_bits(OPEN, 1, WRITES, REFUSE, ALLOW),
        *_by_bits(OPENAT, 2, WRITES, REFUSE, ALLOW),
        *(step for number in ALLOWED_CALLS for step in ((EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW))),
        (RETURN, 0, 0, REFUSE),
    ]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, struct.pack("HP", len(steps), ctypes.addressof(packed)))


def _by_bits(call: int, argument: int, bits: int, on_any: int, on_none: int) -> tuple[BpfInstruction, ...]:
    """Return BPF instructions that answer a system call by whether an argument's lower 32 bits have any of `bits`."""
    place = ARGUMENTS_AT + 8 * argument
    return (
        *((EQUAL, 0, 4, call), (LOAD, 0, 0, place), (ANY_BIT, 0, 1, bits)),
        *((RETURN, 0, 0, on_any), (RETURN, 0, 0, on_none)),
    )
