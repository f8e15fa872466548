"""What worker pods need of the network: the interface of collectives, RDMA, the network of their node."""

from __future__ import annotations

from typing import Any

from rlhf_api.runtime import Runtime
from rlhf_mapper.mapping import Device

INTERFACE = "eth0"
"""What the kubelet calls a pod's own interface."""


def environment(runtime: Runtime, device: Device) -> dict[str, str]:
    """Variables of collectives; of the interface only where its name is known."""
    interface = {} if runtime.host_network else {"GLOO_SOCKET_IFNAME": INTERFACE}
    if device == "CPU":
        return interface
    if interface:
        interface["NCCL_SOCKET_IFNAME"] = INTERFACE
    return {
        **interface,
        "NCCL_DEBUG": "WARN",
        # What each rank did last, beside the log, where a collective hangs.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    }


def of_pod(runtime: Runtime) -> dict[str, Any]:
    """Fields of a worker pod."""
    return {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if runtime.host_network else {}


def capabilities(runtime: Runtime) -> tuple[str, ...]:
    """RDMA pins the memory that it reads and writes."""
    return ("IPC_LOCK",) if runtime.rdma_resource_name else ()


def devices(runtime: Runtime) -> dict[str, str]:
    """Extended resources of a worker."""
    return {runtime.rdma_resource_name: "1"} if runtime.rdma_resource_name else {}
