"""How responses are sampled, and the environments that episodes of several turns are played in."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_api.contract import ENTRYPOINT, MAX_INTEGER, WHOLE, Count, Identifier, Listed, Spec, Text, Uri, Whole
from rlhf_api.expressions import VALUE, Check
from rlhf_api.spec.functions import MAX_DEPTH, EntryPoint, JsonFields, ServiceUrl, StoreUri

Tool = Annotated[str, Field(pattern=ENTRYPOINT, max_length=256)]
STREAM_SHARES = (0.5, 0.25, 0.125, 0.125)
"""Shares of a rank's responses in the groups that generation with `stream` hands on to scoring, one after the other.

Where lengths are skewed, half of the responses end early. Scoring makes a pass for each group, which costs time
besides its tokens. Only the last group is left when generation ends.
"""


def stream_groups(rows: int) -> list[range]:
    """Return the groups (STREAM_SHARES) of a rank's `rows` responses: ranges of indices, by the order of their ends."""
    ends = [int(rows * share) for share in accumulate(STREAM_SHARES)]
    return [range(*each) for each in pairwise([0, *ends])]


@dataclass(frozen=True)
class RestrictsSampling:
    """Annotation of a field of `Rollout` that keeps tokens from being drawn.

    With such a field the generator's log-probabilities are not the model's.
    """

    neutral: float
    """Neutral value of the field: with it, every token may be drawn."""
    parameter: str = ""
    """Name of the field in vLLM's SamplingParams; empty for a field that also holds for greedy responses."""


class Speculation(Spec):
    """How vLLM drafts tokens ahead, which the model then accepts or replaces: the distribution stays the model's."""

    method: Literal["NGram", "Suffix", "Draft"]
    """Source of drafts. NGram: the place where the last tokens came before in prompt and response. Suffix: the same by
    frequencies, with the extra `suffix`. Draft: the likeliest tokens of a small model.
    """
    draft: Uri | None = None
    """URI of the model of Draft, not job://; it has the actor's vocabulary and is not trained."""
    tokens: Annotated[int, Field(ge=1, le=32), WHOLE] = 4
    """Largest number of tokens drafted at a time."""


class AgentProgram(Spec):
    """A program that plays an episode: it asks the model by OpenAI's API, at the URL in OPENAI_BASE_URL."""

    entrypoint: str | None = Field(None, pattern=ENTRYPOINT, max_length=256)
    """Your function, module.path:name, called with the row of the data; it returns a reward or None."""
    arguments: JsonFields[Identifier] | None = Field(
        None, description=f"Arguments of the function, by name; at most {MAX_DEPTH} levels deep."
    )
    command: Listed[Text] | None = Field(None, min_length=1, max_length=64)
    """Command that reads the row as JSON from its standard input, and may post a reward to OPENAI_BASE_URL/reward."""


class Rollout(Spec):
    """How responses are sampled."""

    hints: ClassVar = {"false": "YAML reads n as false; did you mean samplesPerPrompt?"}

    samples_per_prompt: Count = Field(1, description="Responses sampled for each prompt.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature.")
    top_p: Annotated[float, Field(gt=0, le=1), RestrictsSampling(1.0, "top_p")] = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    top_k: Annotated[
        int,
        Field(ge=-1, le=MAX_INTEGER),
        WHOLE,
        Check(VALUE != 0, "is {value}, expected -1 (all tokens) or at least 1"),
        RestrictsSampling(-1, "top_k"),
    ] = -1
    """Sample from this many most likely tokens; -1 means all."""
    min_p: Annotated[float, Field(ge=0, le=1), RestrictsSampling(0.0, "min_p")] = 0.0
    """Sample from tokens with at least this share of the likeliest one's probability."""
    min_response_tokens: Annotated[Whole, RestrictsSampling(0)] = 0
    """No end token before this many tokens."""
    environment: EntryPoint | None = None
    """A class of your own that answers the model, turn by turn, and may reward it."""
    tools: Listed[Tool] | None = Field(None, min_length=1, max_length=64)
    """Functions, module.path:function, that the model may call, as its chat template says."""
    agent: AgentProgram | None = None
    """A program of your own that asks the model by OpenAI's API, and may reward it."""
    max_turns: Count = 8
    """Largest number of the model's answers in an episode; with an environment, tools or an agent."""
    step_timeout_seconds: float = Field(60.0, gt=0)
    """Longest time of a step of the environment, of the tools of a turn, or of an agent outside its calls."""
    max_staleness: Whole = 0
    """Largest number of updates by which a response may be behind the policy. Above 0 the rollout pool works ahead."""
    partial: Literal["Continue", "Restart"] | None = None
    """Continue or Restart the responses under way with the new weights; unset: the weights wait for the responses."""
    weight_sync: Literal["Full", "Delta"] = "Full"
    """Weights that the rollout pool gets after an update. Full: all. Delta: those whose bits changed."""
    weight_store: StoreUri | None = None
    """Folder (file) or object store (s3, gs) that gets each version of the actor's weights, for `rlhf serve` elsewhere.
    """
    stream: bool = False
    """Let models of other pools score finished responses while longer ones are still generated."""
    endpoints: Listed[ServiceUrl] | None = Field(None, min_length=1, max_length=64)
    """URLs of vLLM servers, http://host:port, that generate instead of engines of the job's own."""
    routing: Literal["Replay", "Recompute"] | None = None
    """Replay: an actor with experts learns with those that wrote a response. Unset: so if it has any."""
    keep: float = Field(0.0, ge=0, le=1, description="Share of the prompts whose responses are kept in rollouts.jsonl.")
    quantization: Literal["Int8", "FP8"] | None = None
    """Type of the weights of the generator's linear layers, rounded after each update; FP8 is for GPUs. Unset: no other
    than the trainer's.
    """
    kv_cache: Literal["FP8"] | None = None
    """Type of the generator's KV cache; unset: the trainer's."""
    tensor_parallel: Count | None = None
    """Tensor-parallel shards in generation; their number must divide the actor's. Unset: the mapper's choice, or the
    actor's number (in a pool of its own 1).
    """
    pipeline_parallel: Count | None = None
    """Pipeline stages in generation; their number must divide the actor's. Unset: 1, or the mapper's choice."""
    gpu_memory_utilization: float | None = Field(None, gt=0, lt=1)
    """Share of a GPU's memory that generation may take; unset: the mapper decides."""
    enforce_eager: bool = False
    """Generate without compiling and without CUDA graphs: starts sooner, slower; always on CPU."""
    batch_invariant: bool = False
    """Compute a response on GPUs as if it were alone: vLLM's batch-invariant mode. It slows the trainer's NCCL too."""
    speculation: Speculation | None = None
    """Draft tokens ahead, which costs computation and saves steps of the model; unset: no drafts."""

    @property
    def is_rounded(self) -> bool:
        """Whether the generator computes with rounded weights or keys and values, so it is another policy."""
        return self.quantization is not None or self.kv_cache is not None

    @property
    def has_turns(self) -> bool:
        """Whether a response is an episode, with an environment, tools or an agent."""
        return self.gives_reward or self.tools is not None

    @property
    def gives_reward(self) -> bool:
        """Whether episodes may have a reward of their own: that of an environment or of an agent."""
        return self.environment is not None or self.agent is not None

    @classmethod
    def sampling_restrictions(cls) -> dict[str, RestrictsSampling]:
        """Return the annotation of each field that restricts sampling, by the field's name."""
        return {
            name: each
            for name, field in cls.model_fields.items()
            for each in field.metadata
            if isinstance(each, RestrictsSampling)
        }

    @property
    def samples_everything(self) -> bool:
        """Whether responses are drawn from the model's whole distribution, at any temperature."""
        return all(getattr(self, name) == each.neutral for name, each in self.sampling_restrictions().items())

    def sampling_parameters(self, *, greedy: bool) -> dict[str, float]:
        """Return the sampling restrictions by their names in vLLM; for greedy responses they have neutral values."""
        return {
            each.parameter: each.neutral if greedy else getattr(self, name)
            for name, each in self.sampling_restrictions().items()
            if each.parameter
        }
