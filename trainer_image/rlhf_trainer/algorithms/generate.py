"""Generation of a data set: all responses, the best of n (Stiennon et al., arXiv:2009.01325), or preference pairs.

No model is trained. A later job reads the data set by the address `job://<name>`.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.algorithms import Writing
from rlhf_trainer.algorithms.models import B, Generator, Responses, Reward


class Generate(Writing):
    paper = "arXiv:2009.01325"
    name: Annotated[Literal["Generate"], Field(description="Writing of responses and their rewards as a data set.")]

    @staticmethod
    def step(prompts: B, *, actor: Generator[B], reward: Reward[B], responses: Responses[B]) -> None:
        """Generate and score the responses to a batch of prompts, and write them as rows of the job's data set."""
        batch = actor.generate_sequences(prompts)
        batch = reward.compute_reward(batch)
        responses.write(batch)
