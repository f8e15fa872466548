"""An algorithm of the user's own: a class like those of the package, found by its entry point."""

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal, get_args

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from rlhf_api.contract import OWN_CLASS, Count, Identifier, Listed, Spec, tag_of
from rlhf_api.names import PlacedRole
from rlhf_api.own_code import OwnCodeError, defined_at, describe_error, line_of, package_of
from rlhf_api.problems import Problem, SpecError, suggestion
from rlhf_api.pydantic_errors import validated
from rlhf_api.spec.algorithms import CUSTOM, ActorCritic, Algorithm, PolicyGradient, RowKind
from rlhf_api.spec.functions import MAX_DEPTH, JsonFields

GROUP = "rlhf.algorithms"
"""Group of entry points by which installed packages offer algorithms under names for a manifest."""
FIELD, OPTIONS = "spec.algorithm.entrypoint", "spec.algorithm.options"


def _unknown(prompts: Any) -> None:
    """Placeholder for the step of an own algorithm whose class was not imported."""


class Custom(Algorithm):
    """Own algorithm of a manifest in a process that cannot import its class, such as the operator."""

    paper, step = "", staticmethod(_unknown)
    name: Literal["Custom"] = Field(description="A class of your own, outside this package.")
    entrypoint: str = Field(pattern=OWN_CLASS, max_length=256)
    """Class of the algorithm: module.path:Class, or its name among the entry points rlhf.algorithms."""
    options: JsonFields[Identifier] = Field(
        default_factory=dict, description=f"Options of the class, by name; at most {MAX_DEPTH} levels deep."
    )

    @model_serializer(mode="wrap")
    def _as_in_manifest(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize an own algorithm as its manifest has it; options that its stand-in class inherits are left out."""
        fields: dict[str, Any] = write(self)
        return {name: fields[name] for name in Custom.model_fields if name in fields}


Custom.makes, Custom.offline = "model", False


class AlgorithmFacts(Spec):
    """Properties of an own algorithm's class, as a pod with the job's image reads them."""

    base: Literal["ActorCritic", "PolicyGradient", "Algorithm"] = Field(description="Base class of the algorithm.")
    data: RowKind = Field(description="Kind of the data's rows.")
    models: Listed[Identifier] = Field(max_length=16, description="Parameters of the step after the first one.")
    calls: Listed[str] = Field(max_length=64, description="Calls in the step, in order, such as actor.update_actor.")
    holds: Listed[str] = Field((), max_length=16, description="Names of the class's properties that are true.")
    own_workers: Listed[Identifier] = Field((), max_length=16, description="Parameters with own worker classes.")
    prompts_drawn: Count = Field(1, description="Number of prompts drawn for each one that is trained on.")

    @field_validator("models")
    @classmethod
    def _has_a_model(cls, models: tuple[str, ...]) -> tuple[str, ...]:
        if not {*get_args(PlacedRole)} & {*models}:
            raise ValueError("holds no model, such as actor")
        return models


HOLDS = ("compares_responses", "needs_reference", "has_cost_critic", "may_lack_reward", "rewards_read_log_probs")
BASES: Mapping[str, type[Algorithm]] = {each.__name__: each for each in (ActorCritic, PolicyGradient, Algorithm)}


def algorithm_facts(algorithm: Algorithm) -> AlgorithmFacts:
    """Return the properties of an algorithm's class, which a pod with the job's image reports to the operator."""
    base = next(name for name, base in BASES.items() if isinstance(algorithm, base))
    return AlgorithmFacts.model_validate(
        {
            "base": base,
            "data": algorithm.data,
            "models": algorithm.parameters,
            "calls": [f"{model}.{method}" for model, method in algorithm.calls],
            "holds": [name for name in HOLDS if getattr(algorithm, name, False)],
            "own_workers": list(algorithm.workers),
            "prompts_drawn": algorithm.prompts_drawn,
        }
    )


def describe_algorithm(given: Custom, step: AlgorithmFacts) -> Algorithm:
    """Return a stand-in for an own algorithm, with the properties that a pod has read from its class."""
    return _described_by(step).model_validate(given.model_dump(by_alias=True), by_alias=True, by_name=False)


@lru_cache(maxsize=256)
def _described_by(step: AlgorithmFacts) -> type[Algorithm]:
    base = BASES[step.base]
    made: type[Algorithm] = type("Described", (Custom,) if base is Algorithm else (Custom, base), {})
    calls = [call.partition(".") for call in step.calls]
    made.set_step(step.data, step.models, [(model, method) for model, _, method in calls])
    told = {name: name in step.holds for name in HOLDS}
    for name, value in {**told, "prompts_drawn": step.prompts_drawn}.items():
        setattr(made, name, value)
    made.workers = dict.fromkeys(step.own_workers, object)
    return made


def load_algorithm(given: Custom) -> Algorithm:
    """Return the user's algorithm with its options. Raises OwnCodeError, or SpecError for wrong options."""
    found = algorithm_class(given.entrypoint)
    if "name" in given.options:
        raise SpecError([Problem(f"{OPTIONS}.name", "is taken; choose another name")])
    document = {**given.options, "name": tag_of(found) or CUSTOM}
    try:
        made = validated(found, document)
    except SpecError as error:
        paths = {each: OPTIONS if each.path == "document" else f"{OPTIONS}.{each.path}" for each in error.problems}
        raise SpecError(Problem(path, each.message) for each, path in paths.items()) from None
    except Exception as error:
        where = line_of(error, [package_of(found.__module__)])
        raise OwnCodeError(f"{OPTIONS}: {given.entrypoint} raised {describe_error(error)}{where}") from error
    if isinstance(made, PolicyGradient) and made.kl.coefficient and "reference" not in made.parameters:
        if "coefficient" in made.kl.model_fields_set:
            message = f"is {made.kl.coefficient}, but the step has no reference; expected 0"
            raise SpecError([Problem(f"{OPTIONS}.kl.coefficient", message)])
        made = made.model_copy(update={"kl": made.kl.model_copy(update={"coefficient": 0.0})})
    return made.with_entrypoint(given.entrypoint)


def algorithm_class(entrypoint: str) -> type[Algorithm]:
    """Return the algorithm class that an entry point names. Raises OwnCodeError if it is missing or cannot be used."""
    module, _, name = _address(entrypoint).partition(":")
    try:
        found = getattr(import_module(module), name)
    except Exception as error:
        where = line_of(error, [package_of(module)]) or defined_at(sys.modules.get(module))
        raise OwnCodeError(f"{FIELD}: {entrypoint} cannot be imported: {describe_error(error)}{where}") from error
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        kind = "another class" if isinstance(found, type) else f"of type {type(found).__name__}"
        raise OwnCodeError(f"{FIELD}: {entrypoint} is {kind}, expected a subclass of rlhf.Algorithm{defined_at(found)}")
    if not hasattr(found, "step"):
        lacks = "no step, a static method that makes the calls of one iteration"
        raise OwnCodeError(f"{FIELD}: {entrypoint} has {lacks}{defined_at(found)}")
    if not found.trained + found.frozen:
        lacks = "no parameter that is a model, such as actor, in its step"
        raise OwnCodeError(f"{FIELD}: {entrypoint} has {lacks}{defined_at(found.step)}")
    return found


def own_packages() -> set[str]:
    """Return the packages of own algorithms, and of their workers, that this process has imported."""
    found = [Algorithm]
    for each in found:
        found += each.__subclasses__()
    classes = [*found, *(worker for each in found for worker in each.workers.values())]
    return {package_of(each.__module__) for each in classes} - {"rlhf_api", "rlhf_trainer"}


def own_line(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """Return ` (file:line)` of the line of user code that raised an error, or of the failed function's start."""
    return line_of(error, own_packages()) or (own_place(function) if function else "")


def own_place(function: Callable[..., Any]) -> str:
    """Return ` (file:line)` of the start of a user's function or class; empty if it is not the user's."""
    inner = inspect.unwrap(function)
    return defined_at(inner) if package_of(str(getattr(inner, "__module__", ""))) in own_packages() else ""


def _address(entrypoint: str) -> str:
    if ":" in entrypoint:
        return entrypoint
    installed = {each.name: each.value for each in entry_points(group=GROUP)}
    if entrypoint not in installed:
        raise OwnCodeError(f"{FIELD}: no package has {entrypoint} in {GROUP}; {suggestion(entrypoint, installed)}")
    return installed[entrypoint]
