"""Measures on held-out rows before, during and after training."""

from typing import Annotated

from pydantic import Field

from rlhf_api.contract import Count, Identifier, Spec
from rlhf_api.spec.data import HeldOutData
from rlhf_api.spec.functions import Function
from rlhf_api.spec.verifiers import RewardVerifier


class EvaluationFunction(Function):
    """A function that judges a response."""

    name: Annotated[Identifier, Field(description="Name of the metric.")]


class EvaluationVerifier(RewardVerifier):
    """A verifier that judges a response; a response passes with a score of 1."""

    name: Annotated[Identifier, Field(description="Name of the metric.")]


class Evaluation(Spec):
    """Measures before, during and after training."""

    data: Annotated[
        HeldOutData, Field(description="The rows to measure on: of a data set (uri), or of several (sets).")
    ]
    every_steps: Annotated[Count | None, Field(description="Also measure each time so many steps are done.")] = None
    samples_per_prompt: Annotated[
        Count, Field(le=1024, description="Responses to each prompt; measures are means over all of them. RL only.")
    ] = 1
    greedy: Annotated[bool, Field(description="Each token is the likeliest one, not a sampled one; RL only.")] = False
    functions: Annotated[
        tuple[EvaluationFunction, ...],
        Field(strict=False, max_length=32, description="Functions to apply to responses; RL only."),
    ] = ()
    verifiers: Annotated[
        tuple[EvaluationVerifier, ...],
        Field(strict=False, max_length=32, description="Verifiers to apply to responses; RL only."),
    ] = ()
