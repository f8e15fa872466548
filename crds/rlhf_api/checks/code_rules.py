"""Rules for a manifest's fields that name user code, and for the environment variables of the pods."""

from collections.abc import Iterator

from rlhf_api.checks.rule import Rule
from rlhf_api.expressions import Expression, Field
from rlhf_api.spec.deadlines import CALL_SECONDS
from rlhf_api.spec.job_spec import CODE
from rlhf_api.spec.judges import COMPARES
from rlhf_api.spec.verifiers import Code

OWN_VARIABLES = "RLHF_"
OWN_MEASURES = ("reward", "cost", "win_rate", "win_rate_null", "response_tokens", "response_finished")
"""Names of the measures of every evaluation with responses; no evaluation function or verifier may take them."""
ENVIRONMENT, TOOLS, AGENT = (Field(f"rollout.{field}").is_given for field in ("environment", "tools", "agent"))
SAMPLES = Field("rollout.samplesPerPrompt")
CODE_IN = {
    "models.reward.sum": Field("reward.verifier.name", "one"),
    "evaluation.verifiers": Field("verifier.name", "one"),
}
"""Path of a list in the spec -> expression for the name of an entry's verifier."""


def user_code() -> Iterator[Rule]:
    """Yield the rules for fields that name user code, such as: its time limits are below the deadline of a call."""
    times: dict[str, Expression] = {}
    for form in ("models.reward", "models.reward.sum[].reward"):
        default: Expression | float = 0.0
        for key in ("entrypoint", "verifier", "url"):
            seconds = CODE[key].model_fields["timeout_seconds"].default
            default = Field(f"{form}.{key}").is_given.then(seconds, default)
        times[f"{form}.timeoutSeconds"] = Field(f"{form}.timeoutSeconds").or_else(default)
        times[f"{form}.judge.timeoutSeconds"] = Field(f"{form}.judge.timeoutSeconds")
        alone = Field(f"{form}.judge.prompt").matches(COMPARES) & ~Field(f"{form}.judge.referenceKey").is_given
        message = "compares the responses to a prompt, but rollout.samplesPerPrompt is 1"
        yield Rule(f"{form}.judge.prompt", alone.implies(SAMPLES >= 2), message)
    judges = ("evaluation.functions[]", "evaluation.verifiers[]")
    times["models.teacherEndpoints[].timeoutSeconds"] = Field("models.teacherEndpoints[].timeoutSeconds")
    times |= {f"{judge}.timeoutSeconds": Field(f"{judge}.timeoutSeconds") for judge in judges}
    step = Field("rollout.stepTimeoutSeconds")
    times["rollout.stepTimeoutSeconds"] = (ENVIRONMENT | TOOLS | AGENT).then(step, 0.0)
    yield Rule("rollout.tools", ~(TOOLS & ENVIRONMENT), "are an environment themselves; rollout.environment is another")
    runs_code = ENVIRONMENT | TOOLS | AGENT | (Field("models.reward.verifier.name").or_else("") == "Code")
    for path, name in CODE_IN.items():
        runs_code |= Field(path).where(name.or_else("") == "Code").size() > 0
    message = "is for the verifier Code, rollout.environment, rollout.tools and rollout.agent only"
    yield Rule("sandbox", Field("sandbox").is_given.implies(runs_code), message)
    message = "is {value:g}, but sandbox.seconds is less than 5 times that and 30 for the start"
    for form in ("models.reward", "models.reward.sum[].reward", "evaluation.verifiers[]"):
        runs = Field(f"{form}.verifier.name") == "Code"
        seconds = Field(f"{form}.verifier.seconds").or_else(Code.model_fields["seconds"].default)
        fits = seconds * 5.0 + 30.0 <= Field("sandbox.seconds").as_float()
        yield Rule(f"{form}.verifier.seconds", runs.implies(fits), message)
    for path in ("data.train", "data.train.mix[]", "evaluation.data", "evaluation.data.sets[]"):
        named = Field(f"{path}.toolsKey").is_given
        yield Rule(f"{path}.toolsKey", named.implies(~TOOLS), "names tools, and so does rollout.tools")
    deadline = Field("training.callDeadlineSeconds").or_else(CALL_SECONDS[1])
    message = "is {value:g}, expected less than training.callDeadlineSeconds ({deadline})"
    for path, time in times.items():
        yield Rule(path, time < deadline.as_float(), message, {"deadline": deadline})
    for judge in judges:
        free = ~Field(f"{judge}.name").one_of(OWN_MEASURES)
        yield Rule(f"{judge}.name", free, '"{value}" is taken')
    verifier = Field("evaluation.verifiers[].name")
    same = Field("evaluation.functions").where(Field("name", "one") == verifier).size()
    yield Rule("evaluation.verifiers[].name", same == 0, '"{value}" is one of evaluation.functions, too')


def pods() -> Iterator[Rule]:
    exactly_one = Field("runtime.env[].value").is_given != Field("runtime.env[].secret").is_given
    yield Rule("runtime.env[]", exactly_one, "expected exactly one of value and secret")
    message = f'is "{{value}}"; names that begin with {OWN_VARIABLES} are the operator\'s own'
    yield Rule("runtime.env[].name", ~Field("runtime.env[].name").starts_with(OWN_VARIABLES), message)
