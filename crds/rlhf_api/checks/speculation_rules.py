"""Rules for `rollout.speculation`."""

from collections.abc import Iterator

from rlhf_api.checks.rule import Rule
from rlhf_api.expressions import Field


def speculation() -> Iterator[Rule]:
    """Yield the rules for drafts: vLLM ignores minP with them, and with the other fields they were not tried."""
    fitting = {
        "minP": Field("rollout.minP") == 0.0,
        "routing": ~(Field("rollout.routing") == "Replay"),
        "pipelineParallel": Field("rollout.pipelineParallel") == 1,
        **{name: ~Field(f"rollout.{name}").is_given for name in ("partial", "endpoints", "quantization", "kvCache")},
    }
    for name, fits in fitting.items():
        fits_drafts = Field("rollout.speculation").is_given.implies(fits)
        yield Rule(f"rollout.{name}", fits_drafts, "does not go together with rollout.speculation")
    draft, method = Field("rollout.speculation.draft"), Field("rollout.speculation.method")
    yield Rule("rollout.speculation.draft", draft.is_given.implies(method == "Draft"), "is for method Draft")
    is_there = draft.is_given.implies(~draft.starts_with("job://"))
    yield Rule("rollout.speculation.draft", is_there, "is of another job; a drafting model has to be there already")
    is_given = (method == "Draft").implies(draft.is_given)
    yield Rule("rollout.speculation", is_given, "has method Draft and no draft, which names the model")
