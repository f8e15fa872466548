"""Address at which the ranks of a torch.distributed group meet: loopback, unless they are on several machines."""

import errno
import socket
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Address at which the ranks of a group meet; rank 0 listens there."""

    address: str
    port: int

    def listen(self) -> int | None:
        """Listen at this address alone, as torch's store knows no secret; return the file descriptor.

        None if this machine lacks the address, as behind NAT. OSError if the port is taken.
        """
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        try:
            return socket.create_server((self.address, self.port), family=family).detach()
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return None
