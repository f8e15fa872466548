"""The names by which users, the operator and the trainer know a job and its models."""

from typing import Literal

GROUP = "rlhf.hybridflow.io"
VERSION = "v1alpha1"
API_VERSION: Literal["rlhf.hybridflow.io/v1alpha1"] = "rlhf.hybridflow.io/v1alpha1"
KIND: Literal["RLHFJob"] = "RLHFJob"

POOL_RESOURCE = "rlhf-pool-"
"""With a pool's name, what Ray calls its slots on a cluster where each pool has pods of its own."""

PlacedRole = Literal["actor", "critic", "reference", "reward", "cost"]
"""The models of a manifest."""
Resident = Literal[PlacedRole, "rollout"]
"""What a pool may hold: models, or the generator alone, which has the weights of the actor in another pool."""
Role = Literal[Resident, "cost_critic"]
"""`cost_critic` stands in no manifest: it comes with the critic of SafeRLHF, and lives with it."""
