"""Options of an algorithm that makes one model of several, without training and without data."""

from typing import Literal

from pydantic import Field

from rlhf_api.contract import Listed, Spec, Uri
from rlhf_api.spec.algorithms import Algorithm

FROM_BASE = ("TIES", "DARE")
"""Methods that add up what each model has changed in a common base."""


class MergedModel(Spec):
    """A model to merge, and its weight."""

    uri: Uri
    """URI of a language model."""
    weight: float = Field(1.0, gt=1e-9, le=1e9, description="DARE adds up weights; all others divide by the sum.")


class Merging(Algorithm):
    """Base of algorithms that merge models: the rows of such a job are the layers of its models, one a step."""

    method: Literal["Linear", "SLERP", "TIES", "DARE", "OT"] = "Linear"
    """Linear: the weighted mean. SLERP: a point on the arc between two models. TIES, DARE: the base and what the models
    have changed in it. OT: Linear, after neurons and attention heads are put in the order of the first model's.
    """
    models: Listed[MergedModel] = Field(min_length=1, max_length=16)
    """Models of one shape and vocabulary. The result has config, tokenizer and chat template of the first."""
    base: Uri | None = Field(None, description="URI of the model that the others were made of; TIES, DARE.")
    density: float = Field(1.0, gt=0, le=1)
    """Share of a model's changes that is kept: the largest (TIES), or drawn by training.seed (DARE)."""

    def addresses(self) -> dict[str, str]:
        """Return field of the spec -> URI of each model that is read, the base last."""
        found = {f"algorithm.models.{place}.uri": each.uri for place, each in enumerate(self.models)}
        return found | ({"algorithm.base": self.base} if self.base else {})
