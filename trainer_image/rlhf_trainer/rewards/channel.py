"""JSON values over a stream socket, each after its length in bytes (4, big-endian)."""

from __future__ import annotations

import json
import socket
from typing import Any


def send(channel: socket.socket, value: Any) -> None:
    """Write a value; OSError if the other end is gone or (TimeoutError) does not read."""
    body = json.dumps(value).encode()
    channel.sendall(len(body).to_bytes(4, "big") + body)


def receive(channel: socket.socket) -> Any:
    """The next value; EOFError if the other end is gone, TimeoutError after the socket's time limit."""
    return json.loads(_read(channel, int.from_bytes(_read(channel, 4), "big")))


def _read(channel: socket.socket, count: int) -> bytes:
    body = bytearray()
    while len(body) < count:
        part = channel.recv(count - len(body))
        if not part:
            raise EOFError
        body += part
    return bytes(body)
