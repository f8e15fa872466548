"""Closes this process: from then on the kernel refuses it the network, files to write, and other processes.

By a seccomp filter (Linux's prctl(2) and seccomp(2)), which needs no privilege and cannot be taken back. It lists what
Python needs to compute: whatever is not listed fails as not permitted (EPERM).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
X86_64 = 0xC000003E
"""AUDIT_ARCH_X86_64 of linux/audit.h."""
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
"""Instructions of classic BPF: load 32 bits, jump if equal, jump if any bit is set, return."""
KILL, ALLOW, REFUSE, NO_SUCH_CALL = 0x80000000, 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
"""Offsets in struct seccomp_data."""

ALLOWED = (
    *(0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),  # read, write, close, stat, poll, lseek, mmap, brk
    *(13, 14, 15, 16, 17, 19, 20, 21),  # handlers of signals, ioctl, pread, readv, access
    *(22, 23, 24, 25, 27, 28, 32, 33, 35, 36, 37, 38, 39, 60, 63, 72, 79, 89),  # pipe, select, dup, sleep, timers, exit
    *(95, 96, 97, 98, 99, 100, 102, 104, 107, 108, 110, 131, 158, 186, 201, 202),  # times, own ids, futex
    *(204, 217, 218, 219, 228, 229, 230, 231, 262, 267, 269, 270, 271, 273),  # getdents64, clocks, newfstatat, poll
    *(292, 293, 318, 324, 332, 334, 439),  # getrandom, membarrier, statx, rseq, faccessat2
)
"""Numbers of x86-64's system calls."""
OPEN, OPENAT, CLONE, CLONE3 = 2, 257, 56, 435
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CLONE_THREAD = 0x10000


class _Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def require_can_close() -> None:
    """OSError where the numbers of system calls are others."""
    if platform.machine() != "x86_64":
        raise OSError(errno.ENOSYS, f"code is only run on x86_64, and this is {platform.machine()}")


def close_this_process() -> None:
    """Refuse everything else from now on; OSError if the kernel has no such filters."""
    program = b"".join(
        [
            *(_step(LOAD, ARCHITECTURE_AT), _step(EQUAL, X86_64, yes=1), _step(RETURN, KILL), _step(LOAD, NUMBER_AT)),
            *_when(CLONE3, [_step(RETURN, NO_SUCH_CALL)]),  # C libraries then call clone, whose flags can be read
            *_when(CLONE, _by_bits(0, CLONE_THREAD, then=ALLOW, otherwise=REFUSE)),
            *_when(OPEN, _by_bits(1, WRITES, then=REFUSE, otherwise=ALLOW)),
            *_when(OPENAT, _by_bits(2, WRITES, then=REFUSE, otherwise=ALLOW)),
            *(step for number in ALLOWED for step in _when(number, [_step(RETURN, ALLOW)])),
            _step(RETURN, REFUSE),
        ]
    )
    libc = ctypes.CDLL(None, use_errno=True)
    filter_ = _Filter(len(program) // 8, program)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter_), 0, 0),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "this system cannot close a process to run code in it")


def _step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """struct sock_filter; yes, no: instructions to skip."""
    return struct.pack("HBBI", code, yes, no, value)


def _when(number: int, steps: list[bytes]) -> list[bytes]:
    """These steps, which return, for one system call."""
    return [_step(EQUAL, number, no=len(steps)), *steps]


def _by_bits(argument: int, bits: int, *, then: int, otherwise: int) -> list[bytes]:
    """Return one or the other by whether an argument has any of the bits; its lower half comes first."""
    place = ARGUMENTS_AT + 8 * argument
    return [_step(LOAD, place), _step(ANY_BIT, bits, no=1), _step(RETURN, then), _step(RETURN, otherwise)]
