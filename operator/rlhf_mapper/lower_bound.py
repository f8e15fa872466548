"""Lower bound of the memory on CPU slots for models with a known number of parameters and unknown shapes."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import software_for
from rlhf_mapper.hardware import Cluster
from rlhf_mapper.mapping import Infeasible
from rlhf_mapper.simulate import memory

ONE = Architecture(layers=1, hidden=1, heads=1, kv_heads=1, head_size=1, ffn=1, vocabulary=1)
"""Tiny model that stands for any model when the bytes of states for each parameter are computed."""


def short_of_states(job: Job, cluster: Cluster, parameters: Mapping[Role, float]) -> Infeasible | None:
    """Return why CPU slots cannot hold the states of models with so many parameters; None if the slots may hold them.

    A model that is not in `parameters` counts as 0 bytes.
    """
    software, models = software_for("CPU", job.spec.training.precision), job.models()
    # With LoRA the trained share depends on the unknown shape.
    trained = {role for role, model in models.items() if model.optimizer is not None and model.lora is None}
    states = {
        role: number * sum(memory.states(ONE, software, trains=role in trained).values()) / ONE.parameters
        for role, number in parameters.items()
        if number and models[role].offload != "OptimizerInHost"
    }
    needed = sum(states.values())
    have = software.state_share * sum(group.gpu.memory * group.gpus for group in cluster.groups)
    if needed <= have:
        return None
    there = " and ".join(f"{group.gpus} x {group.gpu.name}" for group in cluster.groups)
    least = f"the states of {', '.join(states)} take at least {needed / 1e9:,.1f} GB"
    return Infeasible(reason=f"{least}, but {there} hold {have / 1e9:,.1f} GB", short_bytes=needed - have)
