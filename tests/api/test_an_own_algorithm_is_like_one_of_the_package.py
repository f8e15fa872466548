"""An algorithm outside the package comes by the same door as those of it: options, step, rules, and what goes wrong."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_api import kubectl_yaml
from rlhf_api.exit_codes import ExitCode
from rlhf_api.files import dump, load
from rlhf_api.job import Job
from rlhf_api.own_code import OwnCodeError
from rlhf_api.problems import SpecError
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.custom_algorithm import Custom
from rlhf_mapper.hardware import GPUS, Cluster, NodeGroup
from rlhf_mapper.remedies import remedies_of
from rlhf_mapper.workload import workload_of
from tests.api.cases import made
from tests.each import each_case

HEAD = "from rlhf import Algorithm, PolicyGradient, Preference, sample_and_learn\n"
RIGHT = """
class Own(PolicyGradient):
    step = staticmethod(sample_and_learn)
    shrink: float = 0.5

    def advantage(self, returns):
        return self.shrink * returns
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for a manifest; what is imported from it is forgotten."""
    path, modules = [*sys.path], {*sys.modules}
    yield tmp_path
    sys.path[:] = path
    for name in {*sys.modules} - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def document(entrypoint: str, options: dict[str, Any], *changes: str, base: str = "GRPO") -> dict[str, Any]:
    found = made(base, changes)
    found["spec"]["algorithm"] = {"name": "Custom", "entrypoint": entrypoint, "options": options}
    return found


def job(folder: Path, source: str, options: dict[str, Any] | None = None, *changes: str) -> Job:
    """The job of a manifest beside a module with this source."""
    (folder / "own.py").write_text(HEAD + source)
    manifest = folder / "job.yaml"
    manifest.write_text(kubectl_yaml.write(document("own:Own", options or {}, *changes)))
    (found,) = load(manifest)
    return found


@each_case("name", sorted(ALGORITHMS.keys() - {"Merge"}))
def test_a_shipped_algorithm_is_the_same_by_its_entry_point(name: str) -> None:
    found, plain = ALGORITHMS[name], made(name)
    entrypoint = f"{found.__module__}:{found.__name__}"
    own = Job.parse(document(entrypoint, {}, base=name), Path())
    shipped = Job.parse(plain, Path())
    assert own.spec.algorithm.model_dump()["entrypoint"] == entrypoint
    assert type(own.spec.algorithm) is type(shipped.spec.algorithm) is found
    assert (own.models(), workload_of(own)) == (shipped.models(), workload_of(shipped))


def test_remedies_are_tried_with_the_class() -> None:
    own = Job.parse(document("rlhf_trainer.algorithms.grpo:GRPO", {}), Path())
    tried: list[Job] = []
    cluster = Cluster((NodeGroup(gpu=GPUS["a100-80g"], count=1, gpus_per_node=1),))

    def fits(other: Job, _: Cluster) -> bool:
        tried.append(other)
        return False

    assert remedies_of(own, cluster, fits) == ()
    assert len(tried) > 3
    assert all("actor" in other.models() for other in tried)


def test_options_are_fields_of_the_class_and_of_its_base(folder: Path) -> None:
    found = job(folder, RIGHT, {"shrink": 0.25, "kl": {"coefficient": 0.0}})
    algorithm = found.spec.algorithm
    assert found.trained() == ("actor",)
    assert "reference" not in found.models(), "there is no penalty"
    assert [".".join(call) for call in algorithm.calls][-2:] == ["advantage.compute_advantage", "actor.update_actor"]
    assert kubectl_yaml.read(dump(found), "")[0]["spec"]["algorithm"]["options"]["shrink"] == 0.25
    (again,) = load(dump(found))
    assert again == pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("options", "changes", "sentence"),
    [
        ({"shrink": "much"}, (), 'algorithm.options.shrink: is "much" (text), expected a number'),
        ({"shrnk": 1}, (), "algorithm.options.shrnk: unknown field; did you mean shrink?"),
        ({"kl": {"coefficient": -1}}, (), "algorithm.options.kl.coefficient: is -1, expected at least 0"),
        ({"name": "x"}, (), "algorithm.options.name: is taken; choose another name"),
        (
            {"kl": {"controller": "Adaptive"}},
            (),
            "algorithm.options.kl.target: is missing, controller Adaptive needs it",
        ),
        (
            {},
            ("models.critic={uri: hf://c}",),
            "models.critic: Custom has no critic; it uses actor, reference or reward",
        ),
        ({}, ("models.reward=",), "models.reward: is missing, Custom needs it"),
        ({}, ("training={totalSteps: 1, batchSize: 4}",), "training.promptBatchSize: is missing, Custom needs it"),
    ],
)
def test_a_mistake_names_its_path(
    folder: Path, options: dict[str, Any], changes: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(SpecError) as raised:
        job(folder, RIGHT, options, *changes)
    assert f"job: spec.{sentence}" in str(raised.value).splitlines()


CLASS, PAIRS = "class Own(PolicyGradient):\n    ", "class Own(Preference):\n    "
MISTAKES: dict[str, tuple[str, str, str]] = {
    "nothing of that name": ("", "AttributeError: module 'own' has no attribute 'Own'", ""),
    "a name that is not there": ("import nowhere\n", "ModuleNotFoundError: No module named 'nowhere'", "2"),
    "what Python cannot read": ("def f(:\n", "SyntaxError: invalid syntax (/", "2"),
    "a text that it cannot read": ("eval('1 +')\n", "SyntaxError: invalid syntax (/", "2"),
    "a syntax of its own": ("raise SyntaxError('mine')\n", "SyntaxError: mine (/", "2"),
    "an error of the module": ("\nx = 1 / 0\n", "ZeroDivisionError: division by zero", "3"),
    "a function": ("def Own(prompts): ...\n", "is of type function, expected a subclass of rlhf.Algorithm", "2"),
    "a class that is no algorithm": (
        "class Own: ...\n",
        "is another class, expected a subclass of rlhf.Algorithm",
        "2",
    ),
    "no step": (
        "class Own(Algorithm): ...\n",
        "has no step, a static method that makes the calls of one iteration",
        "2",
    ),
    "no model": (
        CLASS + "step = staticmethod(lambda prompts: None)\n",
        "has no parameter that is a model, such as actor",
        "3",
    ),
    "rows that no data give": (
        CLASS + "step = staticmethod(lambda rows: None)\n",
        "TypeError: the step's first parameter is rows, expected the data's rows: prompts, completions, ",
        "2",
    ),
    "no advantage": (
        CLASS + "step = staticmethod(sample_and_learn)\n",
        "TypeError: the step of Own asks for an advantage, and it has none",
        "2",
    ),
    "no loss of pairs": (
        PAIRS + "step = staticmethod(lambda pairs, *, actor: actor.update_actor(pairs))\n",
        "TypeError: the actor of Own learns by losses, and it has none",
        "2",
    ),
    "no reward of a pair's responses": (
        PAIRS + "losses, step = max, staticmethod(lambda pairs, *, actor: actor.update_actor(pairs))\n",
        "TypeError: the actor of Own learns by implicit_rewards, and it has none",
        "2",
    ),
    "a worker of no parameter": (
        CLASS + "step, workers = staticmethod(lambda prompts: None), {'actr': int}\n",
        "TypeError: workers has actr, which is no parameter of the step",
        "2",
    ),
    "an error of the step": (
        CLASS + "@staticmethod\n    def step(prompts, *, actor):\n        batch = actr.generate_sequences(prompts)\n",
        "NameError: name 'actr' is not defined",
        "5",
    ),
}


WITHOUT_REFERENCE = """class Own(PolicyGradient):
    step = staticmethod(lambda prompts, *, actor, reward: actor.update_actor(prompts))
"""


@pytest.mark.parametrize("options", [{}, {"kl": {}}, {"kl": {"coefficient": 0}}])
def test_a_step_without_reference_has_no_penalty(folder: Path, options: dict[str, Any]) -> None:
    found = job(folder, WITHOUT_REFERENCE, options).spec.algorithm
    assert found.kl.coefficient == 0.0  # type: ignore[attr-defined]
    assert not found.needs_reference


def test_a_penalty_needs_a_reference_in_the_step(folder: Path) -> None:
    with pytest.raises(
        SpecError, match=r"options\.kl\.coefficient: is 0\.1, but the step has no reference; expected 0$"
    ):
        job(folder, WITHOUT_REFERENCE, {"kl": {"coefficient": 0.1}})


@pytest.mark.parametrize("role", ["critic", "cost", "teacher"])
def test_an_agents_episodes_are_for_models_that_read_branches(folder: Path, role: str) -> None:
    source = WITHOUT_REFERENCE.replace("reward", role)
    changes = (f"models.{role}={{uri: hf://x}}", "rollout.agent={entrypoint: 'a:run'}", "models.reward=")
    with pytest.raises(SpecError, match=r"rollout\.agent: is for .*; Custom needs rows of one text"):
        job(folder, source, {}, *changes)


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_wrong_with_the_class_is_said_with_its_line(folder: Path, name: str) -> None:
    source, sentence, line = MISTAKES[name]
    with pytest.raises(OwnCodeError) as raised:
        job(folder, source)
    said = str(raised.value).replace("cannot be imported: ", "")
    assert raised.value.exit_code == ExitCode.USER_CODE
    assert said.startswith(f"job: spec.algorithm.entrypoint: own:Own {sentence}")
    assert re.findall(r" \(/\S+/own\.py:?(\d*)\)$", said) == [line]


def test_what_has_any_attribute_has_no_line(folder: Path) -> None:
    """So it has `__wrapped__`, too, without end."""
    source = "class Any:\n    def __getattr__(self, name):\n        return self\n\nOwn = Any()\n"
    with pytest.raises(OwnCodeError, match=r"own:Own is of type Any, expected a subclass of rlhf.Algorithm$"):
        job(folder, source)


def test_a_module_that_is_nowhere_is_named() -> None:
    with pytest.raises(OwnCodeError, match=r"nowhere:Own cannot be imported: .*No module named 'nowhere'$"):
        Job.parse(document("nowhere:Own", {}), Path())


def test_without_a_folder_nothing_is_imported() -> None:
    """So an API server and the operator take it, whose image does not have the class."""
    found = Job.parse(document("nowhere:Own", {"any": [1, None]}, "models.critic={uri: hf://c}"))
    assert isinstance(found.spec.algorithm, Custom)
    assert kubectl_yaml.read(dump(found), "")[0]["spec"]["algorithm"]["options"] == {"any": [1, None]}


def test_a_manifest_s_folder_comes_after_what_is_installed(folder: Path) -> None:
    (folder / "statistics.py").write_text("raise RuntimeError('the wrong module')")
    sys.modules.pop("statistics", None)
    job(folder, "import statistics\n" + RIGHT)
