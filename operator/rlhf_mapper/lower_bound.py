"""What models need at least of which only the number of parameters is known, whatever their shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import Software, software_for
from rlhf_mapper.hardware import Cluster, NodeGroup
from rlhf_mapper.mapping import Device, Infeasible
from rlhf_mapper.simulate import memory

ONE = Architecture(layers=1, hidden=1, heads=1, kv_heads=1, head_size=1, ffn=1, vocabulary=1)
"""Any model: what is asked are the bytes of a parameter."""


def short_of_states(
    job: Job, cluster: Cluster, parameters: Mapping[Role, float], *, device: Device
) -> Infeasible | None:
    """Why a cluster cannot hold the states of models of so many parameters, as the manifest says; None where it may.

    A model that is not in `parameters` counts as nothing.
    """
    software, models = software_for(device, job.spec.training.precision), job.models()
    states = {
        role: number * sum(memory.states(ONE, software, trains=bool(models[role].optimizer)).values()) / ONE.parameters
        for role, number in parameters.items()
        if number and models[role].offload != "OptimizerInHost"
    }
    waiting = {role for role in states if software.may_offload and models[role].offload != "None"}
    always = sum(size for role, size in states.items() if role not in waiting)
    needed = always + max((states[role] for role in waiting), default=0.0)
    have = sum(_room(group, software) for group in cluster.groups)
    if needed <= have:
        return None
    there = " and ".join(f"{group.gpus} x {group.gpu.name}" for group in cluster.groups)
    nodes = [(group, math.ceil(needed * group.count / _room(group, software))) for group in cluster.groups]
    enough = " or ".join(f"{count * group.gpus_per_node} x {group.gpu.name}" for group, count in nodes)
    reason = f"the states of {', '.join(states)} take at least {needed / 1e9:,.1f} GB, but {there} hold "
    reason += f"{have / 1e9:,.1f} GB; no fewer than {enough} could"
    if software.may_offload and max(states.values()) <= have:
        reason += ", unless models wait in host memory (spec.models.<role>.offload)"
    return Infeasible(reason=reason, short_bytes=needed - have)


def _room(group: NodeGroup, software: Software) -> float:
    """Bytes that states may fill on the GPUs of some nodes."""
    return software.state_share * group.gpu.memory * group.gpus
