"""A cost model from pairs of responses and whether each is safe (Safe RLHF, arXiv:2310.12773, section 3.2)."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.algorithms import Algorithm
from rlhf_trainer.algorithms.models import B, CostInTraining


class CostModel(Algorithm):
    paper = "arXiv:2310.12773, section 3.2"
    name: Annotated[Literal["CostModel"], Field(description="Training of a cost model on pairs and safety labels.")]

    @staticmethod
    def step(safety_pairs: B, *, cost: CostInTraining[B]) -> None:
        """Take one optimizer step of the cost model on a batch of pairs with safety labels."""
        cost.update_cost(safety_pairs)
