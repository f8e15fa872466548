"""Rules for jobs that merge models (`Merging`), which read no data and take no step of training."""

from collections.abc import Iterator

from rlhf_api.checks.rule import Rule, algorithm
from rlhf_api.expressions import Expression, Field
from rlhf_api.spec.merging import FROM_BASE, Merging

MERGES = algorithm(lambda each: issubclass(each, Merging))
ROWS = Expression(lambda known: bool(known["spec"].data.train.sources("")), Field("data.train").is_given.cel)


def merges() -> Iterator[Rule]:
    """Yield the rules for what a method needs, and for the parts of a spec that other jobs need."""
    method, base = Field("algorithm.method").or_else("Linear"), Field("algorithm.base").is_given
    from_base, count = method.one_of(FROM_BASE), Field("algorithm.models").size()
    yield Rule("algorithm.base", from_base.implies(base), "is missing, TIES and DARE need it")
    whole = from_base | (~base & (Field("algorithm.density").or_else(1.0) == 1.0))
    yield Rule("algorithm", whole, "has a base or a density, which are for TIES and DARE only")
    enough = (count == 2) | ((count > 2) & (method != "SLERP"))
    yield Rule("algorithm.models", enough, "expected at least two models, and no more for SLERP")
    yield Rule("data.train", MERGES | ROWS, "is missing, {name} needs it")
    given = {path: Field(path).is_given for path in ("models.actor", "evaluation", "training.totalSteps")}
    for path, is_given in {"data.train": ROWS, **given}.items():
        yield Rule(path, ~(MERGES & is_given), "is not for {name}, which reads algorithm.models and no data")
    slots = (f"{pool}.{size}" for pool in ("resources", "placement.pools[]") for size in ("nodes", "slotsPerNode"))
    for path in ("training.batchSize", "training.totalEpochs", *slots):
        yield Rule(path, MERGES.implies(Field(path) == 1), "is {value}; {name} takes one layer a step, on one slot")
    on_cpu = Field("resources.device").one_of(("Auto", "CPU"))
    yield Rule("resources.device", MERGES.implies(on_cpu), "is {value}; {name} runs on a CPU slot")
