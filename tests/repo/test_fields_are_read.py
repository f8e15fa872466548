"""A field of the spec exists only if code reads it."""

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import rlhf_api.spec.algorithms
import rlhf_api.spec.data
import rlhf_api.spec.functions
import rlhf_api.spec.job_spec
import rlhf_api.spec.judges
import rlhf_api.spec.model_shape
import rlhf_api.spec.outputs
import rlhf_api.spec.rollout
import rlhf_api.spec.run_policy
import rlhf_api.spec.runtime
import rlhf_api.spec.verifiers
from rlhf_api.contract import Spec
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.rollout import Rollout
from tests.repo.tree import ROOT

MODULES = (
    rlhf_api.spec.algorithms,
    *(sys.modules[each.__module__] for each in ALGORITHMS.values()),
    rlhf_api.spec.data,
    rlhf_api.spec.functions,
    rlhf_api.spec.model_shape,
    rlhf_api.spec.outputs,
    rlhf_api.spec.rollout,
    rlhf_api.spec.run_policy,
    rlhf_api.spec.runtime,
    rlhf_api.spec.job_spec,
    rlhf_api.spec.verifiers,
    rlhf_api.spec.judges,
)
MODELS = [
    value
    for module in MODULES
    for value in vars(module).values()
    if inspect.isclass(value) and issubclass(value, Spec) and value.__module__ == module.__name__
]
FIELDS = [
    f"{model.__name__}.{name}" for model in MODELS for name in model.__annotations__ if name in model.model_fields
]
DEFINITIONS = [Path(str(module.__file__)).resolve() for module in MODULES]

OUTSIDE = 'x.one = 1; two = x; f(three=3, key="four"); print(x.five)'
BY_NAME = 'for key in ("six", "seven eight"): print(getattr(x, key), getattr(y, "nine"))'
INSIDE = """
class Model:
    def used(self): return self.a
    def unused(self): return self.b
"""


def attributes(tree: ast.AST) -> set[str]:
    """Every `name` of an expression `x.name` that is read, not assigned to."""
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def keys(tree: ast.AST) -> set[str]:
    """Every key of an expression `x["key"]` or `x.get("key")`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    gets = [node.args[0] for node in calls if node.func.attr == "get" and node.args]  # type: ignore[attr-defined]
    read = [*gets, *(node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript))]
    return {key.value for key in read if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def read_by(source: str) -> set[str]:
    """What a module reads: x.name, x["key"], and any text it mentions if it calls `getattr(x, variable)`."""
    tree = ast.parse(source)
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return attributes(tree) | keys(tree) | (texts if any(map(_reads_by_name, ast.walk(tree))) else set())


def _reads_by_name(node: ast.AST) -> bool:
    is_getattr = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
    return is_getattr and isinstance(node, ast.Call) and not isinstance(node.args[1], ast.Constant)


def read_through(definitions: str, used: set[str]) -> Iterator[str]:
    """What those methods and properties of the definitions read that others use."""
    for node in ast.walk(ast.parse(definitions)):
        if isinstance(node, ast.FunctionDef) and node.name in used:
            yield from attributes(node)


def all_read(definitions: str, sources: Iterable[str]) -> set[str]:
    """The attributes that the sources read, directly or through a method of the definitions."""
    used = set().union(*map(read_by, sources))
    return used | set(read_through(definitions, used))


@pytest.fixture(scope="module")
def read() -> set[str]:
    """What the product reads."""
    files = [path for part in ("crds", "operator", "trainer_image") for path in (ROOT / part).rglob("*.py")]
    definitions = "\n".join(path.read_text() for path in DEFINITIONS)
    found = all_read(definitions, [path.read_text() for path in files if path.resolve() not in DEFINITIONS])
    by_annotation = {name for name, each in Rollout.sampling_restrictions().items() if each.parameter}
    return found | (by_annotation if "sampling_parameters" in found else set())


def test_each_field_is_read_by_code(read: set[str]) -> None:
    assert not [field for field in FIELDS if field.split(".")[1] not in read], "use it or delete it"


def test_the_fields_are_found() -> None:
    assert {"JobSpec.algorithm", "ActorCritic.gae_lambda", "PPO.name", "Rollout.temperature"} <= set(FIELDS)


@pytest.mark.parametrize(
    ("source", "expected"),
    {
        "assigning and mentioning are not reading": (OUTSIDE, {"five"}),
        "getattr with a variable is": (BY_NAME, {"six", "seven eight", "nine"}),
        "a method of the spec is, if it is used": ("model.used()", {"used", "a"}),
    }.values(),
)
def test_what_counts_as_reading(source: str, expected: set[str]) -> None:
    assert all_read(INSIDE, [source]) == expected
