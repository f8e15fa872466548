"""Merging of language models into one, without training; a later job reads it by the address `job://<name>`.

Linear: the mean (Wortsman et al., arXiv:2203.05482). TIES: changes of an elected sign (Yadav et al., arXiv:2306.01708).
DARE: changes of which a random share is kept (Yu et al., arXiv:2311.03099). OT: the mean of aligned neurons and heads
(Singh and Jaggi, arXiv:1910.05653); the transport plan is exact, so alignment changes no model's function.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.merging import Merging
from rlhf_trainer.algorithms.models import B, Merger


class Merge(Merging):
    paper = "arXiv:1910.05653"
    name: Annotated[Literal["Merge"], Field(description="Making of one language model of several, without training.")]

    @staticmethod
    def step(layers: B, *, actor: Merger[B]) -> None:
        """Merge one layer of all models."""
        actor.merge(layers)
