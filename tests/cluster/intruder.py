"""Program of an intruder's pod, which connects to the ports of a job's pods without a credential.

`python intruder.py ADDRESS COMMAND PORTS` prints the answer of each port of the head pod as JSON. LET_IN means that the
intruder had its way: most ports are asked to run COMMAND as the job. PORTS is a JSON of {pod: [address, ports]}; each
of these ports is tried in all known ways, and then gets garbage.
"""

import http.client
import json
import os
import socket
import struct
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

SECONDS: Final = 10
PATIENCE: Final = 6
"""Seconds for the network to learn who the pod is."""
SECONDS_A_PORT: Final = 2
THREADS: Final = 16
LET_IN: Final = "let in"
HELLO: Final = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 12345)
"""Greeting of a client to torch's store (TCPStoreLibUvBackend.cpp); the store repeats the number at the end."""
METHODS: Final = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "NodeManagerService/GetNodeStats",
    "ObjectManagerService/Pull",
    "CoreWorkerService/GetCoreWorkerStats",
    "RayletDriver/ClusterInfo",
    "LogService/ListLogs",
    "ReporterService/GetTraceback",
)
"""A method of each of Ray's servers."""
CLOSED, SILENT, STORE = "closed", "silent", "store"
"""Answers of a port without a connection, of one that takes bytes and says nothing, and of torch's store."""
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


def answer_of(address: str, port: int) -> str:
    """Return what a port says to a pod without a credential: the first of these that holds.

    Why it cannot be connected to; STORE; gRPC's code; HTTP's status; SILENT if it only takes bytes.
    """
    try:
        socket.create_connection((address, port), timeout=SECONDS_A_PORT).close()
    except OSError as error:
        return f"{CLOSED}: {error}"
    said = store(address, port) or code(address, port) or status(address, port) or SILENT
    with socket.create_connection((address, port), timeout=SECONDS_A_PORT) as connection:
        connection.sendall(os.urandom(4096))
    return said


def store(address: str, port: int) -> str:
    """Add a key to torch's store, and return STORE if it is kept; empty if there is no store."""
    with socket.create_connection((address, port), timeout=SECONDS_A_PORT) as connection:
        try:
            connection.sendall(HELLO)
            if connection.recv(4) != HELLO[-4:]:
                return ""
        except OSError:
            return ""
    from torch._C._distributed_c10d import TCPStore

    patience = timedelta(seconds=SECONDS_A_PORT)
    found = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience)
    found.add("intruder", 1)
    return STORE if "intruder" in found.list_keys() else ""


def code(address: str, port: int) -> str:
    """Return the code of gRPC that a server of Ray gives to a call without a token; empty without gRPC."""
    import grpc

    found = ""
    with grpc.insecure_channel(f"{address}:{port}") as channel:
        for method in METHODS:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=SECONDS_A_PORT)
            except grpc.RpcError as error:
                found = str(error.code().name)
            else:
                return LET_IN
            if found != "UNIMPLEMENTED":  # as of servers that have no such method
                break
    return "" if found in ("UNAVAILABLE", "DEADLINE_EXCEEDED") else found


def status(address: str, port: int) -> str:
    """Status of HTTP for the root; empty without HTTP."""
    try:
        with urllib.request.urlopen(f"http://{address}:{port}/", timeout=SECONDS_A_PORT) as found:
            return str(found.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except (OSError, ValueError, http.client.HTTPException):
        return ""


def main(address: str, command: str, ports: str) -> None:
    """Knock at all doors."""
    own_status = urllib.request.Request(f"http://{address}:8490/status.json")
    end = time.monotonic() + PATIENCE
    while asked(own_status) != LET_IN and time.monotonic() < end:
        time.sleep(0.2)
    doors = {
        "dashboard": post(f"http://{address}:8265/api/jobs/", command),
        "agent": post(f"http://{address}:52365/api/job_agent/jobs/", command),
        "client": called(f"{address}:10001", connect),
        "gcs": called(f"{address}:6379", join),
        "status": asked(own_status),
    }
    places = [(f"{pod} {port}", at, port) for pod, (at, each) in json.loads(ports).items() for port in each]
    with ThreadPoolExecutor(THREADS) as threads:
        answers = threads.map(lambda place: answer_of(*place[1:]), places)
        doors |= {name: answer for (name, _, _), answer in zip(places, answers, strict=True)}
    print(json.dumps(doors))


if __name__ == "__main__":
    main(*sys.argv[1:])
