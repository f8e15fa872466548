"""Each rule is one expression: CEL, evaluated by Google's own library, says of any spec what Python says of it."""

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import pytest
from cel_expr_python import cel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from helm.crd.definition import in_cel
from helm.crd.schema import structural_schema
from rlhf_api.checks import rule as one_rule
from rlhf_api.checks import rules
from rlhf_api.checks.rules import RULES
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.job_spec import JobSpec
from rlhf_trainer.algorithms.reinforce_pp import REINFORCEPP
from rlhf_trainer.algorithms.rloo import RLOO
from tests.api.cases import RIGHT, ROLES, SPECS, WRONG, made

ENV = cel.NewEnv(variables={"self": cel.Type.DYN})


@cache
def schema() -> dict[str, Any]:
    """The structural schema of a spec."""
    return structural_schema(JobSpec)


@cache
def compiled(number: int) -> tuple[str, cel.Expression]:
    """Where a rule stands in the schema, and its program."""
    path, entry = in_cel(RULES[number], schema())
    return path.removeprefix("spec").removeprefix("."), ENV.compile(entry["rule"])


def stored(value: Any, schema: dict[str, Any]) -> Any:
    """A document as an API server keeps it: with its defaults, without null, and a number as a number."""
    if "properties" in schema:
        known = schema["properties"]
        value = {name: copy.deepcopy(each["default"]) for name, each in known.items() if "default" in each} | {
            name: each for name, each in value.items() if each is not None
        }
        return {name: stored(each, known[name]) for name, each in value.items()}
    if "items" in schema:
        return [stored(each, schema["items"]) for each in value]
    return float(value) if schema["type"] == "number" else value


def at(path: str, value: Any) -> Iterator[Any]:
    """Every value at a path of a schema."""
    first, _, rest = path.partition(".")
    if not path:
        yield value
    elif (name := first.removesuffix("[]")) in value:
        for each in value[name] if first != name else [value[name]]:
            yield from at(rest, each)


def broken_in_cel(document: dict[str, Any]) -> set[int]:
    """The rules that do not hold somewhere, by their numbers; a value is made known to CEL once for all its rules."""
    paths = {compiled(number)[0] for number in range(len(RULES))}
    known = {path: [ENV.Activation({"self": each}) for each in at(path, document)] for path in paths}
    found = set()
    for number, rule in enumerate(RULES):
        path, program = compiled(number)
        verdicts = [program.eval(each).plain_value() for each in known[path]]
        assert all(isinstance(each, bool) for each in verdicts), (rule, verdicts)
        found |= {number} if not all(verdicts) else set()
    return found


def broken(document: dict[str, Any]) -> set[int]:
    """The rules that a spec breaks, by their numbers, once Python and CEL agree."""
    spec, kept = JobSpec.model_validate(document, by_alias=True, by_name=False), stored(document, schema())
    in_python = {number for number, rule in enumerate(RULES) if any(rule.problems(spec))}
    assert broken_in_cel(kept) == in_python, document
    return in_python


def test_every_case_is_judged_alike_every_rule_broken_once() -> None:
    seen: set[int] = set()
    for case in [*RIGHT.values(), *WRONG.values()]:
        try:
            seen |= broken(case.document()["spec"])
        except ValidationError:
            continue  # a field is wrong by itself
    assert [RULES[number] for number in range(len(RULES)) if number not in seen] == []


def _objects(**fields: list[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A mapping of some of the fields, each with one of its values."""
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in fields.items()})


MODEL = _objects(
    optimizer=[{}], offload=["None", "Optimizer", "All", "OptimizerInHost"], gradientCheckpointing=[True, False],
    parallelism=[{}, {"tensor": 2}, {"pipeline": 3, "tensor": 4}],
    shape=[{}, {"name": "llama-3-8b"}, {"hiddenSize": 8}],
).map(lambda more: {"uri": "hf://m", **more})  # fmt: skip
CODE = st.one_of(
    _objects(timeoutSeconds=[29.5, 60, 1800]).map(lambda more: {"entrypoint": "a:b", **more}),
    _objects(timeoutSeconds=[29.5, 60, 1800]).map(lambda more: {"url": "http://h", **more}),
)
TERMS = st.lists(
    st.builds(lambda name, reward: {"name": name, "reward": reward}, st.sampled_from("abcd"), MODEL | CODE),
    min_size=1, max_size=4, unique_by=lambda term: term["name"],
)  # fmt: skip
POOLS = st.lists(
    st.builds(
        lambda name, models: {"name": name, "models": models, "slotsPerNode": 1},
        st.sampled_from("abc"),
        st.lists(st.sampled_from(ROLES), min_size=1, max_size=5, unique=True),
    ),
    max_size=3, unique_by=lambda pool: pool["name"],
)  # fmt: skip
FUNCTIONS = st.lists(
    st.builds(
        lambda name, more: {"name": name, "entrypoint": "a:b", **more},
        st.sampled_from(["f", "reward", "cost"]), _objects(timeoutSeconds=[1, 60, 1800.5]),
    ),
    max_size=2, unique_by=lambda function: function["name"],
)  # fmt: skip
OPTIONS = _objects(
    kl=[
        {}, {"coefficient": 0}, {"controller": "Adaptive"}, {"controller": "Adaptive", "target": 6}, {"target": 6},
        {"controller": "Adaptive", "target": 6, "applyTo": "Loss"}, {"controller": "Adaptive", "applyTo": "Reward"},
    ],
    ratio=["Token", "Sequence"], aggregation=["TokenMean", "SequenceMean"], baseline=["None", "Group"],
    lagrange=[{}, {"initial": 9}, {"maximum": 0.5}], pretrainCoefficient=[0.5],
    rewards=[{}, {"overlongPenalty": {"bufferTokens": 20}}],
)  # fmt: skip
PARTS = {
    "training": _objects(
        totalSteps=[3], totalEpochs=[1], promptBatchSize=[4, 6], batchSize=[8], miniBatchSize=[2, 4, 5],
        updateEpochs=[1, 2], callDeadlineSeconds=[30, 60, 1800], oldLogProbs=["Auto", "Generator"],
    ),
    "rollout": _objects(
        samplesPerPrompt=[1, 2, 4], temperature=[1, 0.5], minResponseTokens=[0, 20], tensorParallel=[1, 2, 3],
        pipelineParallel=[1, 2],
    ),
    "data": _objects(minResponseTokens=[1, 20], maxResponseTokens=[16, 1024], pretrain=[{"uri": "hf://x"}]),
    "resources": _objects(nodes=[1, 2], maxNodes=[1, 2]),
    "placement": st.builds(
        lambda mode, pools: {"mode": mode, "pools": pools}, st.sampled_from(["Auto", "Manual"]), POOLS
    ),
    "evaluation": FUNCTIONS.map(lambda functions: {"data": {"uri": "hf://x"}, "functions": functions}),
    "runtime": st.just({"env": [{"name": "A", "value": "b"}, {"name": "RLHF_A"}]}),
}  # fmt: skip


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A small right spec of any algorithm in which some parts are others, each field right by itself."""
    name = draw(st.sampled_from(list(SPECS)))
    document: dict[str, Any] = made(name)["spec"]
    known = {info.alias for info in ALGORITHMS[name].model_fields.values()}
    document["algorithm"] |= {option: value for option, value in draw(OPTIONS).items() if option in known}
    for role, model in draw(st.dictionaries(st.sampled_from(ROLES), st.none() | MODEL, max_size=3)).items():
        document.setdefault("models", {})[role] = model
    if draw(st.booleans()):
        document.setdefault("models", {})["reward"] = draw(MODEL | CODE | TERMS.map(lambda terms: {"sum": terms}))
    for part in draw(st.sets(st.sampled_from(list(PARTS)), max_size=4)):
        document[part] = {**document.get(part, {}), **draw(PARTS[part])}
    return document


def test_an_algorithm_that_inherits_a_property_has_it_in_cel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Heir(RLOO):
        name: Literal["Heir"]  # type: ignore[assignment]

    class HeirWithAnOption(REINFORCEPP):
        name: Literal["HeirWithAnOption"]  # type: ignore[assignment]

    known = {"Heir": Heir, "HeirWithAnOption": HeirWithAnOption, "PPO": ALGORITHMS["PPO"]}
    for module in (rules, one_rule):
        monkeypatch.setattr(module, "ALGORITHMS", known)
    found = (rule for part in rules.PARTS for rule in part() if rule.path == "rollout.samplesPerPrompt")
    (rule,) = (rule for rule in found if "compares the responses" in rule.message)
    program = ENV.compile(in_cel(rule, schema())[1]["rule"])

    def allowed(samples: int, **algorithm: str) -> object:
        spec = {"algorithm": algorithm, "rollout": {"samplesPerPrompt": samples}}
        return program.eval(data={"self": spec}).plain_value()

    assert allowed(2, name="Heir")
    assert allowed(1, name="HeirWithAnOption")
    assert allowed(1, name="Heir") is False
    assert allowed(1, name="HeirWithAnOption", baseline="Group") is False


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(documents())
def test_any_spec_is_judged_alike(document: dict[str, Any]) -> None:
    broken(document)
