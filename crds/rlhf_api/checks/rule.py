"""Rules over several fields of a spec, and tests of its algorithm."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from rlhf_api.expressions import Expression, Field, Places, Values, holds
from rlhf_api.problems import Problem
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.algorithms import CUSTOM, Algorithm
from rlhf_api.spec.custom_algorithm import Custom
from rlhf_api.spec.job_spec import JobSpec


@dataclass(frozen=True)
class Rule:
    """Test of a spec or, where `path` has `[]`, of each entry of that list; if it fails, the field at `path` is wrong.

    `message` may contain {value} (the value at `path`), {name} (the algorithm's) and the names in `values`.
    """

    path: str
    test: Expression
    message: str
    values: Mapping[str, Expression] = field(default_factory=dict)

    def problems(self, spec: JobSpec) -> Iterator[Problem]:
        """Yield a problem for each path of the spec at which the rule is broken."""
        path, entry, _ = self.path.partition("[]")
        for place, each in enumerate(Field(path).of({"spec": spec}) or () if entry else [spec]):
            known = {"spec": spec, "each": each}
            if not holds(self.test, known):
                said = {name: value.of(known) for name, value in self.values.items()}
                said |= {"value": Field(self.path).of(known), "name": spec.algorithm.name}
                yield Problem(self.path.replace("[]", f".{place}"), self.message.format(**said))


class _Step(Field):
    """Expression for a job's algorithm; unset where its class is unknown, as a user's class is to the API server."""

    def _value(self, values: Values) -> Algorithm | None:
        found = values["spec"].algorithm
        return None if type(found) is Custom else found

    def presence(self, places: Places) -> list[str]:
        return [f"({NAME.cel(places)} != '{CUSTOM}')"]


NAME, STEP = Field("algorithm.name"), _Step("algorithm")


def algorithm(test: Callable[[type[Algorithm]], bool]) -> Expression:
    """Return the expression that is true if a test holds for the class of the job's algorithm."""
    names = tuple(name for name, each in ALGORITHMS.items() if test(each))
    return Expression(lambda known: test(type(known["spec"].algorithm)), NAME.one_of(names).cel, (STEP,))
