"""Flux (kstatus) and Argo CD read a job's phase from its conditions; no Lua is here to run Argo CD's script."""

import re
from typing import Any, get_args

import pytest
import yaml

from helm.crd.definition import definition
from rlhf_api.status import Phase, Readiness
from rlhf_operator import names
from rlhf_operator.placement.node_groups import with_coming_nodes
from rlhf_operator.settings import Settings
from tests.each import each_case
from tests.operator.kstatus import state
from tests.operator.simulated import SFT, World
from tests.repo.tree import ROOT

STATES = {
    **dict.fromkeys(("Running", "Suspended", "Succeeded"), "Current"),
    **dict.fromkeys(("Pending", "Mapping", "Queued", "Provisioning", "Initializing"), "InProgress"),
    **dict.fromkeys(("WaitingForNodes", "Restarting", "Suspending"), "InProgress"),
    "Failed": "Failed",
}
"""Phase -> state by kstatus; Running is Current, as a Kubernetes Job is once it has begun."""
HEALTH = {"Current": "Healthy", "InProgress": "Progressing", "Failed": "Degraded"}
EXAMPLES = ROOT / "helm/rlhf-operator/examples"


def document(world: World) -> dict[str, Any]:
    return {"metadata": {"generation": world.generation}, "status": world.status.document()}


def new(phase: str) -> World:
    """A job on a cluster on which it gets to that phase."""
    world = World(labels={names.QUEUE: "team"}, spec={**SFT, "runPolicy": {"backoffLimit": int(phase == "Restarting")}})
    if phase == "Pending":
        world.capabilities = frozenset()
    if phase == "WaitingForNodes":
        world.has_kueue, group = False, {"name": "grows", "matchLabels": {"pool": "grows"}, "max": 2}
        world.settings = Settings.model_validate({"nodeGroups": [group]}, by_alias=True, by_name=False)
        world.nodes = with_coming_nodes((), world.settings)
    if phase == "Mapping":
        world.nodes = ()
        world.spec = {**SFT, "resources": {"device": "GPU"}}
    return world


def life(phase: str) -> World:
    """A job in that phase."""
    world = new(phase)
    world.settle()
    if phase in ("Pending", "Mapping", "Queued", "WaitingForNodes"):
        return world
    world.admit()
    world.settle()
    if phase == "Provisioning":
        return world
    if phase == "Initializing":
        world.make_pods()
        world.start_pods()
        world.settle()
        return world
    return begun(world, phase)


def begun(world: World, phase: str) -> World:
    """A job that has begun to train, and is now in that phase."""
    world.run_to(50 if phase == "Succeeded" else 10)
    if phase.startswith("Suspend"):
        world.edit(suspend=True)
    if phase in ("Restarting", "Failed"):
        world.end(5)
    if phase == "Succeeded":
        world.end(0)
        world.ray_tells()
    world.settle()
    for _ in range(3 if phase == "Suspended" else 0):
        world.collect()
        world.settle()
    return world


@each_case("phase", STATES)
def test_the_state_of_a_job_is_that_of_its_phase(phase: str) -> None:
    world = life(phase)
    assert world.phase == phase
    assert state(document(world)) == STATES[phase]
    holding = [
        each.type for each in world.status.conditions if each.status == "True" and each.type in get_args(Readiness)
    ]
    assert holding == [{"Current": "Ready", "InProgress": "Reconciling", "Failed": "Stalled"}[STATES[phase]]]


def test_every_phase_of_a_cluster_has_a_state() -> None:
    assert {*STATES, "Stopped"} == set(get_args(Phase))


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_finished_job_of_the_last_release_has_a_state_too(phase: str) -> None:
    world = life(phase)
    kept = tuple(each for each in world.status.conditions if each.type not in get_args(Readiness))
    world.status = world.status.model_copy(update={"conditions": kept})
    world.settle()
    assert (world.phase, state(document(world))) == (phase, STATES[phase])


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_an_edit_of_a_finished_job_does_not_leave_it_in_progress(phase: str) -> None:
    world = life(phase)
    world.edit(runPolicy={"ttlSecondsAfterFinished": 86400})
    world.settle()
    assert (world.phase, state(document(world))) == (phase, STATES[phase])


def test_a_slow_job_has_not_failed() -> None:
    world = World(spec={**SFT, "runPolicy": {"progressDeadlineSeconds": 1000}})
    world.settle()
    world.admit()
    world.run_to(49)
    world.wait(600)
    world.settle()
    assert any((each.type, each.status) == ("Slow", "True") for each in world.status.conditions)
    assert state(document(world)) == "Current"


def test_a_spec_that_the_operator_has_not_seen_is_in_progress() -> None:
    schema = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    new = {"metadata": {"generation": 1}, "status": schema["properties"]["status"]["default"]}
    assert state(new) == "InProgress"
    world = life("Running")
    world.edit(suspend=True)
    assert state(document(world)) == "InProgress"


def test_argo_cds_script_reads_the_same_conditions() -> None:
    """The script is compared with a table: no interpreter of Lua is among the tests' packages."""
    script = yaml.safe_load((EXAMPLES / "argocd-health.yaml").read_text())["data"]
    ((name, text),) = script.items()
    assert name == "resource.customizations.health.rlhf.hybridflow.io_RLHFJob"
    (table,) = re.findall(r"states = \{(.*)\}", text)
    read = dict(re.findall(r'(\w+) = "(\w+)"', table))
    assert read == {kind: HEALTH[word] for kind, word in zip(get_args(Readiness), HEALTH, strict=True)}
    assert text.count(" then\n") + text.count(" do\n") == text.count("end\n"), "each block ends"


def test_flux_waits_for_jobs() -> None:
    spec = yaml.safe_load((EXAMPLES / "flux.yaml").read_text())["spec"]
    assert spec["wait"] is True
    assert "healthChecks" not in spec
