"""What runs in an intruder's pod: knocks at the doors of a job's head pod, without any credential.

`python intruder.py ADDRESS COMMAND` prints, as JSON, what each door says; LET_IN where it does what the intruder wants,
which is to run COMMAND as the job where that can be had.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, Final

SECONDS: Final = 10
PATIENCE: Final = 6
"""Seconds for the network to learn who the pod is."""
LET_IN: Final = "let in"
KEPT_OUT: Final = ("UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED")
"""Codes of gRPC for who has no token and for who reaches nobody; any other is an answer."""


def post(url: str, command: str) -> str:
    """Ray's job API."""
    body = json.dumps({"entrypoint": command}).encode()
    return asked(urllib.request.Request(url, body, {"Content-Type": "application/json"}))


def asked(request: urllib.request.Request) -> str:
    """What an HTTP server says."""
    try:
        with urllib.request.urlopen(request, timeout=SECONDS):
            return LET_IN
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read(200).decode(errors='replace')}"
    except OSError as error:
        return str(error)


def called(address: str, call: Callable[[Any], object]) -> str:
    """What a gRPC server says."""
    import grpc  # type: ignore[import-untyped]

    with grpc.insecure_channel(address) as channel:
        try:
            call(channel)
        except grpc.RpcError as error:
            return LET_IN if error.code().name not in KEPT_OUT else f"{error.code().name} {error.details()}"
        return LET_IN


def join(channel: Any) -> object:
    """What a worker of Ray asks the head first."""
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
    return stub.GetAllNodeInfo(gcs_service_pb2.GetAllNodeInfoRequest(), timeout=SECONDS)


def connect(channel: Any) -> object:
    """What a driver on another machine asks Ray's client server first."""
    from ray.core.generated import ray_client_pb2, ray_client_pb2_grpc

    stub = ray_client_pb2_grpc.RayletDriverStub(channel)
    return stub.Init(ray_client_pb2.InitRequest(), timeout=SECONDS)


def main(address: str, command: str) -> None:
    """Knock at all doors."""
    status = urllib.request.Request(f"http://{address}:8490/status.json")
    end = time.monotonic() + PATIENCE
    while asked(status) != LET_IN and time.monotonic() < end:
        time.sleep(0.2)
    doors = {
        "dashboard": post(f"http://{address}:8265/api/jobs/", command),
        "agent": post(f"http://{address}:52365/api/job_agent/jobs/", command),
        "client": called(f"{address}:10001", connect),
        "gcs": called(f"{address}:6379", join),
        "status": asked(status),
    }
    print(json.dumps(doors))


if __name__ == "__main__":
    main(*sys.argv[1:])
