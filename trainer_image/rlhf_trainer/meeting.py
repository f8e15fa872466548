"""Address at which the ranks of a torch.distributed group meet: loopback, unless they are on several machines."""

import errno
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
LOOK_SECONDS, ANSWER_SECONDS, MOST_SECONDS = 0.02, 1.0, 10.0
"""Seconds between two attempts to connect, of one attempt, and of all attempts together."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Address at which the ranks of a group meet; rank 0 listens there."""

    address: str
    port: int

    def listen(self) -> int | None:
        """Listen at this address alone, as torch's store has no authentication; return the file descriptor.

        None if this machine lacks the address, as behind NAT. OSError if the port is taken.
        """
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        try:
            return socket.create_server((self.address, self.port), family=family).detach()
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return None

    def wait_for_listener(self) -> None:
        """Wait up to MOST_SECONDS for rank 0 to listen; torch's own client tries again only after half a second."""
        until = time.monotonic() + MOST_SECONDS
        while time.monotonic() < until:
            with suppress(OSError), socket.create_connection((self.address, self.port), ANSWER_SECONDS):
                return
            time.sleep(LOOK_SECONDS)
