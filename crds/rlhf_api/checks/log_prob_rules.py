"""Rules for the source of a token's log-probability, trainer or generator, and for options that compare the two."""

import operator
from collections.abc import Iterator
from functools import reduce

from pydantic.alias_generators import to_camel

from rlhf_api.checks.rule import Rule, algorithm
from rlhf_api.expressions import Field
from rlhf_api.spec.algorithms import PolicyGradient
from rlhf_api.spec.rollout import Rollout

STALE = Field("rollout.maxStaleness") > 0
MISMATCHED = (
    *((path, Field(path).is_given) for path in ("rollout.quantization", "rollout.kvCache")),
    ("rollout.maxStaleness", STALE),
)
"""(field, expression that is true if the field makes the generator's probabilities differ from the trainer's)."""
BY_GENERATOR = Field("training.oldLogProbs") == "Generator"
LEARNS = algorithm(lambda each: issubclass(each, PolicyGradient))


def log_probs(rollout: type[Rollout] = Rollout) -> Iterator[Rule]:
    """Yield the rules for options that read the generator's log-probabilities, which need unrestricted sampling."""
    path = "training.oldLogProbs"
    yield Rule(path, (Field(path) == "Auto") | LEARNS, "is {value}, but {name} reads none")
    corrected, weighs = Field("algorithm.rolloutCorrection").is_given, "weighs tokens by the generator's probabilities"
    for field, is_set, is_weighed, what in (
        (path, BY_GENERATOR, False, "is Generator, which gives them"),
        ("algorithm.rolloutCorrection", corrected, True, f"{weighs}, which are the model's"),
        *(
            (each, differs & LEARNS, True, f"is {{value}}, so the actor {weighs}, which are the model's")
            for each, differs in MISMATCHED
        ),
    ):
        # minResponseTokens (without `parameter`) divides probabilities by 1 - p(end); importance weights correct this.
        restrictions = rollout.sampling_restrictions().items()
        neutral = {to_camel(name): each.neutral for name, each in restrictions if each.parameter or not is_weighed}
        sampled = reduce(operator.and_, (Field(f"rollout.{name}") == value for name, value in neutral.items()))
        *words, last = (f"{name} {value:g}" for name, value in neutral.items())
        yield Rule(field, is_set.implies(sampled), f"{what} only with {', '.join(words)} and {last}")
    message = "compares the trainer's log-probabilities with the generator's, but training.oldLogProbs is Generator"
    yield Rule("algorithm.rolloutCorrection", BY_GENERATOR.implies(~corrected), message)


def steering() -> Iterator[Rule]:
    """Yield the rules for `algorithm.kl.controller` and the KL target to which it steers."""
    controller, target = Field("algorithm.kl.controller"), Field("algorithm.kl.target").is_given
    is_fixed = controller.or_else("Fixed") == "Fixed"
    message = "is missing, controller {controller} needs it"
    yield Rule("algorithm.kl.target", is_fixed | target, message, {"controller": controller})
    yield Rule("algorithm.kl.target", target.implies(~is_fixed), "is not for controller Fixed")
    message = "is {value}, which needs the trainer's log-probabilities, but training.oldLogProbs is Generator"
    yield Rule("algorithm.kl.controller", (controller == "LearningRate").implies(~BY_GENERATOR), message)


def corrections() -> Iterator[Rule]:
    """Yield the rules for importance weights (`algorithm.rolloutCorrection`), and for `watch.mismatch`."""
    path = "algorithm.rolloutCorrection"
    low, high, cap = (Field(f"{path}.{bound}") for bound in ("low", "high", "cap"))
    yield Rule(f"{path}.cap", high.is_given.implies(~cap.is_given), "is an older name of high, which is given, too")
    two_sided = Field(f"{path}.mode").one_of(("Clip", "Mask"))
    yield Rule(f"{path}.low", low.is_given.implies(two_sided), "is for the modes Clip and Mask only")
    gated, path = Field("watch.mismatch").is_given, "watch.mismatch.action"
    yield Rule("watch.mismatch", gated.implies(LEARNS), "is for algorithms that learn from advantages only")
    stops = Field(path).one_of(("SkipUpdate", "Fail"))
    message = "is {value}, which needs the trainer's log-probabilities, but training.oldLogProbs is Generator"
    yield Rule(path, stops.implies(~BY_GENERATOR), message)
