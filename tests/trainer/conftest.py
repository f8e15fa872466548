"""An S3 server of this machine, for the tests of checkpoints."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import fsspec
import pytest

from tests.patience import PATIENCE_SECONDS


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Address of a bucket; the server is a process of its own, for torch cannot look through flask's modules."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            wait_for(port)
            fsspec.filesystem("s3").mkdir("bucket")
            yield "s3://bucket"
    finally:
        server.kill()
        server.wait()


def wait_for(port: int) -> None:
    """Until something listens there."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        with socket.socket() as door:
            if not door.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.1)
    pytest.fail("the S3 server does not start")
