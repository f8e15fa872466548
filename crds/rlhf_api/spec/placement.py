"""Placement of models on pools of slots: `placement` of a spec."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.contract import OBJECTIVE, Name, NodeCount, SlotCount, Spec
from rlhf_api.names import PoolRole


class Pool(Spec):
    """Slots that some models share."""

    name: Annotated[Name, Field(description="Name of the pool.")]
    models: Annotated[
        tuple[PoolRole, ...],
        Field(
            strict=False,
            min_length=1,
            max_length=5,
            description="Roles that live here; `rollout`, which lives alone, generates what the actor then does not.",
        ),
    ]
    nodes: Annotated[NodeCount, Field(description="Nodes of the pool.")] = 1
    slots_per_node: Annotated[SlotCount, Field(description="Slots of each node.")]


class Placement(Spec):
    """Placement of models on pools of slots."""

    mode: Annotated[Literal["Auto", "Manual"], Field(description="Auto lets the mapper decide.")] = "Auto"
    pools: Annotated[
        tuple[Pool, ...], Field(strict=False, max_length=8, description="The pools; with Manual only.")
    ] = ()
    objective: Annotated[
        str,
        Field(
            pattern=OBJECTIVE,
            max_length=32,
            description="Of a step: least time, fewest GPUs for this time, or least price.",
        ),
    ] = "throughput"
    remap: Annotated[
        Literal["Never", "AtCheckpoint"],
        Field(description="When a running job takes a placement that measured steps show to be better; on a cluster."),
    ] = "Never"
