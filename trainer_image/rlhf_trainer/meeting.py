"""Address at which the ranks of a torch.distributed group meet; machines without ranks get no answer there.

Torch's store knows no secret and lists its keys, so the kernel keeps other machines away from its socket.
"""

import ctypes
import logging
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

LOOPBACK = "127.0.0.1"
LOOPBACK_NETWORK = 0x7F000000  # 127.0.0.0/8, from which proxies in the pod connect
SO_ATTACH_REUSEPORT_CBPF = 51
LOAD, AND, UNLESS_EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06  # the kernel's packet filter (linux/bpf_common.h)
SOURCE = 0xFFF00000 + 12  # place of the source address in a packet of IPv4, as a filter counts (SKF_NET_OFF)
LISTENER, DECOY = (RETURN, 0, 0, 0), (RETURN, 0, 0, 1)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Address at which the ranks of a group meet; rank 0 listens there."""

    address: str
    port: int
    machines: Sequence[str] = ()
    """Addresses from which the ranks connect; empty: any machine may."""

    def listen(self) -> int:
        """Listen at this address alone, to these machines and to proxies in the pod; return the file descriptor."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        listen = partial(socket.create_server, (self.address, self.port), family=family, reuse_port=bool(self.machines))
        listener = listen()
        if self.machines:
            decoy = listen()
            try:
                _divert_others(listener, self.machines)
                decoy.detach()
            except OSError as error:  # as with a thousand machines, with IPv6, and in some sandboxes
                decoy.close()
                logging.getLogger(__name__).warning("%s answers any machine: %s", listener.getsockname(), error)
        return listener.detach()


def _divert_others(listener: socket.socket, machines: Sequence[str]) -> None:
    """Have connections from other machines go to the second socket of this port, which nobody reads."""
    code = [(LOAD, 0, 0, SOURCE)]
    for machine in machines:
        code += [(UNLESS_EQUAL, 0, 1, int.from_bytes(socket.inet_aton(machine))), LISTENER]
    code += [(AND, 0, 0, 0xFF000000), (UNLESS_EQUAL, 0, 1, LOOPBACK_NETWORK), LISTENER, DECOY]
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    program = struct.pack("HP", len(code), ctypes.addressof(instructions))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, program)
