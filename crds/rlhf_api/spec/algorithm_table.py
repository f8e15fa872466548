"""Table of the algorithms that a job may name: one class in each module of the packages that an entry point names.

The contract may not import the trainer, but checks a manifest by the options of the trainer's algorithms. So the
installed metadata of this project names the package of the algorithms (pyproject.toml, docs/adr/0007).
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import distributions
from pkgutil import iter_modules
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Annotated, TypeAlias, Union

from pydantic import AfterValidator, Discriminator, SerializeAsAny, ValidationInfo

from rlhf_api.contract import null_is_unset, tag_of
from rlhf_api.spec.algorithms import Algorithm, PolicyGradient, Preference
from rlhf_api.spec.custom_algorithm import Custom, describe_algorithm, load_algorithm

PROJECT, GROUP = "rlhf-operator", "rlhf.algorithm_packages"
"""Name of this project, and the group of its entry points that name packages of algorithms."""


def algorithm_packages() -> list[ModuleType]:
    """Import the packages of algorithms. Raises ModuleNotFoundError if the installed metadata names none."""
    for installed in distributions(name=PROJECT):  # metadata of an older release may exist too
        if packages := [each.load() for each in installed.entry_points.select(group=GROUP)]:
            return packages
    raise ModuleNotFoundError(f"the package {PROJECT} is not installed, or an older version is: run `make install`")


def _found() -> Iterator[type[Algorithm]]:
    packages = algorithm_packages()
    for name in [f"{package.__name__}.{each.name}" for package in packages for each in iter_modules(package.__path__)]:
        for each in vars(import_module(name)).values():
            is_own = isinstance(each, type) and issubclass(each, Algorithm) and each.__module__ == name
            if is_own and tag_of(each):
                yield each


def _place(algorithm: type[Algorithm]) -> tuple[bool, bool, bool, str]:
    """Return the sort key: learners from data, from pairs, from advantages, then those that train nothing; by paper."""
    kinds = issubclass(algorithm, PolicyGradient), issubclass(algorithm, Preference)
    return (not algorithm.trained, *kinds, algorithm.paper)


ALGORITHMS: Mapping[str, type[Algorithm]] = MappingProxyType(
    {tag_of(each): each for each in sorted(_found(), key=_place)}
)
"""Name of an algorithm -> its class, in the order in which the API reference lists them."""


def _with_its_class(algorithm: Algorithm, info: ValidationInfo) -> Algorithm:
    """Return a user's own algorithm: by its class if the manifest's folder is known, else as a pod described it."""
    known = info.context or {}
    if not isinstance(algorithm, Custom):
        return algorithm
    if "folder" in known:
        return load_algorithm(algorithm)
    return describe_algorithm(algorithm, known["step"]) if known.get("step") else algorithm


if TYPE_CHECKING:
    AnyAlgorithm: TypeAlias = Algorithm
else:
    AnyAlgorithm = Annotated[
        SerializeAsAny[Union[(*ALGORITHMS.values(), Custom)]],
        Discriminator("name"),
        null_is_unset(*ALGORITHMS.values(), Custom),
        AfterValidator(_with_its_class),
    ]
