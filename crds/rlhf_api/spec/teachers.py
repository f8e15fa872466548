"""Teachers of a student (on-policy distillation) behind servers of language models."""

from pydantic import Field

from rlhf_api.contract import Count, Identifier, Spec, Text
from rlhf_api.spec.functions import ServiceUrl


class TeacherEndpoint(Spec):
    """A teacher behind POST <url>/completions of vLLM's server, with token ids of the actor's tokenizer."""

    name: Text = Field(
        description="Name of the teacher; the value of algorithm.teacherKey in the rows that it teaches."
    )
    url: ServiceUrl = Field(description="URL of the API, such as http://host:8000/v1; /completions is added.")
    model: Text = Field(description="Name by which the API knows the model.")
    timeout_seconds: float = Field(120.0, gt=0, description="Longest time of one attempt for one response.")
    attempts: Count = Field(8, description="Largest number of attempts for one response, with growing pauses between.")
    concurrency: Count = 64
    """Largest number of responses at once, over all ranks; one a rank at least."""
    token_variable: Identifier | None = Field(None, description="Environment variable that holds the bearer token.")
