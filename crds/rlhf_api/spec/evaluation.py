"""Measurements of a model on held-out data: before, during and after training."""

from pydantic import Field

from rlhf_api.contract import Count, Identifier, Listed, Spec
from rlhf_api.spec.data import HeldOutData
from rlhf_api.spec.functions import Function
from rlhf_api.spec.verifiers import RewardVerifier


class EvaluationFunction(Function):
    """A function that judges a response."""

    name: Identifier = Field(description="Name of the metric.")


class EvaluationVerifier(RewardVerifier):
    """A verifier that judges a response; a response passes with a score of 1."""

    name: Identifier = Field(description="Name of the metric.")


class Evaluation(Spec):
    """Evaluation of the model before, during and after training."""

    data: HeldOutData = Field(description="The rows to measure on: of a data set (uri), or of several (sets).")
    every_steps: Count | None = Field(None, description="Steps between measurements in training; unset: none there.")
    samples_per_prompt: Count = Field(1, le=1024)
    """Responses to each prompt; measures are means over all of them. RL only."""
    greedy: bool = Field(False, description="Take the likeliest token each time instead of sampling; RL only.")
    functions: Listed[EvaluationFunction] = Field((), max_length=32)
    """Functions to apply to responses; RL only."""
    verifiers: Listed[EvaluationVerifier] = Field((), max_length=32)
    """Verifiers to apply to responses; RL only."""
