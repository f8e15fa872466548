"""Program that tries to get out of a pod: to each door that it is given, and over the limits of its own.

`python3 escape.py DOORS` with DOORS as JSON {name: [protocol, address, port]}. It prints JSON: for each door `open`, or
why it is closed, and what it found in the pod: bytes that a file may have, and credentials. It needs Python alone.
"""

import errno
import json
import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

OPEN = "open"
SECONDS = 3.0
POLICY_SECONDS = 3.0
"""In which the network plugin of the test cluster learns of a new pod."""
ASK_DNS = (
    bytes.fromhex("1a2b01000001000000000000")
    + b"\x0akubernetes\x07default\x03svc\x07cluster\x05local\x00\x00\x01\x00\x01"
)
MEBIBYTE = 2**20
FOLDERS = ("/tmp", "/dev/shm", "/dev/termination-log", "/", "/usr", "/etc", "/var/tmp", "/proc/1/fd/1")
MOST_BYTES = 4 * 2**30


def tried(protocol: str, address: str, port: int) -> str:
    """Whether a connection is made, or a datagram answered; TCP has to say nothing."""
    kind = socket.SOCK_STREAM if protocol == "TCP" else socket.SOCK_DGRAM
    try:
        with socket.socket(socket.AF_INET, kind) as door:
            door.settimeout(SECONDS)
            door.connect((address, port))
            if protocol == "UDP":
                door.send(ASK_DNS)
                door.recv(512)
            return OPEN
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, type(error).__name__)


def bytes_written(place: str) -> int:
    """Bytes that a file takes there before it is refused."""
    path, written = Path(place), 0
    with suppress(PermissionError):
        if path.exists() and path.resolve() == Path(os.devnull):
            return 0
        path = path / "escape" if path.is_dir() else path
    with suppress(OSError), path.open("ab", buffering=0) as file:
        while written < MOST_BYTES:
            written += file.write(b"x" * MEBIBYTE)
    if path.name == "escape":
        with suppress(OSError):
            path.unlink()
    return written


def port_of_requests() -> int:
    """Port of the program of this sandbox, which is process 1."""
    return int(Path("/proc/1/cmdline").read_text().split("\0")[4])


def taken_over() -> list[str]:
    """Ways in which this program could serve requests in place of process 1, or use what process 1 has open."""
    found = []
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")):
        for option in (socket.SO_KEEPALIVE, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            with suppress(OSError), socket.socket(family) as door:
                door.setsockopt(socket.SOL_SOCKET, option, 1)
                door.bind((address, port_of_requests()))
                door.listen()
                found.append(f"listens at {address!r} with option {option}")
    for path in ("/proc/1/mem", "/proc/1/fd"):
        with suppress(OSError):
            os.close(os.open(path, os.O_RDONLY))
            found.append(path)
    return found


def credentials() -> list[str]:
    """Files with tokens, and variables that are not of the image or of Kubernetes' own Service."""
    files = [str(path) for path in Path("/var/run/secrets").rglob("*")] if Path("/var/run/secrets").exists() else []
    return [
        *files,
        *(name for name in os.environ if name.startswith("RLHF_") or "TOKEN" in name.replace("TOKENIZERS", "")),
    ]


def main(doors: dict[str, tuple[str, str, int]]) -> None:
    """Try everything."""
    time.sleep(POLICY_SECONDS)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that is too large is an error then, not the end
    found = {
        "doors": {name: tried(*door) for name, door in doors.items()},
        "written": {place: bytes_written(place) for place in FOLDERS},
        "credentials": credentials(),
        "taken_over": taken_over(),
        "user": os.getuid(),
        "core": resource.getrlimit(resource.RLIMIT_CORE)[1],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
