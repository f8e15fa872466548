"""Placement of models on pools of slots: `placement` of a spec."""

from typing import Literal

from pydantic import Field

from rlhf_api.contract import OBJECTIVE, Listed, Name, NodeCount, SlotCount, Spec
from rlhf_api.names import PoolRole


class Pool(Spec):
    """Slots that some models share."""

    name: Name = Field(description="Name of the pool.")
    models: Listed[PoolRole] = Field(min_length=1, max_length=5)
    """Roles that live here; `rollout`, which lives alone, generates what the actor then does not."""
    nodes: NodeCount = Field(1, description="Nodes of the pool.")
    slots_per_node: SlotCount = Field(description="Slots of each node.")


class Placement(Spec):
    """Placement of models on pools of slots."""

    mode: Literal["Auto", "Manual"] = Field("Auto", description="Auto lets the mapper decide.")
    pools: Listed[Pool] = Field((), max_length=8, description="The pools; with Manual only.")
    objective: str = Field("throughput", pattern=OBJECTIVE, max_length=32)
    """Of a step: least time, fewest GPUs for this time, or least price."""
    remap: Literal["Never", "AtCheckpoint"] = "Never"
    """When a running job takes a placement that measured steps show to be better; on a cluster."""
