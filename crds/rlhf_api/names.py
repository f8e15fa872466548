"""The names by which users, the operator and the trainer know a job and its models."""

from typing import Literal

GROUP = "rlhf.hybridflow.io"
VERSION = "v1alpha1"
API_VERSION: Literal["rlhf.hybridflow.io/v1alpha1"] = "rlhf.hybridflow.io/v1alpha1"
KIND: Literal["RLHFJob"] = "RLHFJob"

POOL_RESOURCE = "rlhf-pool-"
"""Prefix of Ray's resource for a pool's slots, on a cluster where each pool has pods of its own."""

PlacedRole = Literal["actor", "critic", "reference", "reward", "cost", "teacher"]
"""Roles of the models that a manifest may name."""
PoolRole = Literal[PlacedRole, "rollout"]
"""Roles that a manifest may list in a pool. `rollout`, a generator with the actor's weights, has a pool for itself."""
Role = Literal[PoolRole, "cost_critic"]
"""Roles of all models. No manifest names `cost_critic`: it comes with SafeRLHF's critic, in the critic's pool."""


def slots_text(count: int, kind: str) -> str:
    """Return a number of slots in words: `8 GPUs`, `1 CPU slot`; kind: the device, or the name of the GPU type."""
    return f"{count} {'CPU slot' if kind.lower().startswith('cpu') else 'GPU'}{'s' * (count != 1)}"
