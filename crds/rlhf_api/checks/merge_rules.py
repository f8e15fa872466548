"""Rules for jobs that merge models (`Merging`), which read no data and take no step of training."""

from collections.abc import Iterator

from rlhf_api.checks.rule import Rule, algorithm
from rlhf_api.expressions import Expression, Field
from rlhf_api.spec.merging import FROM_BASE, Merging

MERGES = algorithm(lambda each: issubclass(each, Merging))
ROWS = Expression(lambda known: bool(known["spec"].data.train.sources("")), Field("data.train").is_given.cel)


def merges() -> Iterator[Rule]:
    """Yield the rules for the options of a method, and for the parts of a spec that only other jobs need."""
    method, base = Field("algorithm.method").or_else("Linear"), Field("algorithm.base").is_given
    from_base, count = method.one_of(FROM_BASE), Field("algorithm.models").size()
    yield Rule("algorithm.base", from_base.implies(base), "is missing, TIES and DARE need it")
    yield Rule("algorithm.base", base.implies(from_base), "is for TIES and DARE only")
    whole = from_base | (Field("algorithm.density").or_else(1.0) == 1.0)
    yield Rule("algorithm.density", whole, "is {value}, but only TIES and DARE leave out changes; expected 1")
    enough = (count == 2) | ((count > 2) & (method != "SLERP"))
    yield Rule("algorithm.models", enough, "expected two models or more; SLERP takes exactly two")
    yield Rule("data.train", MERGES | ROWS, "is missing, {name} needs it")
    given = {path: Field(path).is_given for path in ("models.actor", "evaluation", "training.totalSteps")}
    for path, is_given in {"data.train": ROWS, **given}.items():
        yield Rule(path, ~(MERGES & is_given), "is not for {name}, which reads algorithm.models and no data")
    slots = (f"{pool}.{size}" for pool in ("resources", "placement.pools[]") for size in ("nodes", "slotsPerNode"))
    for path in ("training.batchSize", "training.totalEpochs", *slots):
        yield Rule(path, MERGES.implies(Field(path) == 1), "is {value}; {name} takes one layer a step, on one slot")
    on_cpu = Field("resources.device").one_of(("Auto", "CPU"))
    yield Rule("resources.device", MERGES.implies(on_cpu), "is {value}; {name} runs on a CPU slot")
