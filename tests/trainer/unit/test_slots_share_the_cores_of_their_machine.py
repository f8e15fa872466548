"""How many threads the process of a slot gets, by what Ray says of its machines; and which cores are ours."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private.node import Node

from rlhf_trainer.controller.resource_pool import RayNode, threads_of
from rlhf_trainer.run import machine, session, slots


def node(name: str, *, alive: bool = True, **resources: float) -> RayNode:
    known: Any = {"NodeID": name, "Alive": alive, "Resources": resources}
    found: RayNode = known
    return found


def pool(*machines: tuple[str, int], device: str = "CPU") -> Any:
    return SimpleNamespace(device=device, machines=lambda: list(machines))


def test_slots_of_all_pools_share_a_machines_cores() -> None:
    nodes = [node("a", CPU=16.0), node("b", CPU=9.0), node("c", alive=False, CPU=1.0)]
    assert threads_of([pool(("a", 1))], nodes) == [16]
    assert threads_of([pool(("a", 2)), pool(("a", 1), ("a", 1)), pool(("b", 2))], nodes) == [4, 4, 4]
    assert threads_of([pool(("a", 1)), pool(("a", 1), ("b", 3))], nodes) == [8, 3], "ranks wait for the slowest"
    assert threads_of([pool(("b", 20))], nodes) == [1]


def test_gpus_share_a_machines_cores_whoever_uses_them() -> None:
    nodes = [node("a", CPU=96.0, GPU=8.0), node("b", CPU=90.0, GPU=8.0), node("c", CPU=2.0)]
    assert threads_of([pool(("a", 8), ("b", 8), device="GPU")], nodes) == [11]
    assert threads_of([pool(("a", 2), device="GPU")], nodes) == [12]
    assert threads_of([pool(("a", 8), device="GPU")], [node("a", CPU=4.0, GPU=8.0)]) == [1]


def test_the_users_own_setting_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert slots.threads_told([pool(("a", 1)), pool(("b", 1))]) == [{"OMP_NUM_THREADS": "3"}] * 2


@pytest.mark.parametrize("said", ["", "0", "-1", "many"])
def test_a_setting_that_is_no_number_of_threads_does_not(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    monkeypatch.setattr(ray, "nodes", lambda: [node("a", CPU=6.0)])
    assert slots.threads_told([pool(("a", 2))]) == [{"OMP_NUM_THREADS": "3"}]


def test_workers_of_an_own_ray_are_as_nice_as_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(ray, "init", lambda **_: started.append(dict(os.environ)))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with session.ray_session(None, cpu_slots=1):
        assert started[0]["RAY_worker_niceness"] == "0"


def test_an_own_ray_has_no_processes_that_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [getattr(Node, name) for name in session.MONITORS]
    answers: list[None] = []
    monkeypatch.setattr(ray, "init", lambda **_: answers.extend(getattr(Node, name)(None) for name in session.MONITORS))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with session.ray_session(None, cpu_slots=1):
        assert [getattr(Node, name) for name in session.MONITORS] == before
    assert answers == [None] * len(before)


def test_in_a_pod_the_operator_sets_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_ATTEMPT", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray gives the process that submits a job
    assert slots.threads_told([pool(("a", 1)), pool(("b", 1))]) == [{}, {}]


@pytest.mark.parametrize(
    ("said", "expected"), [("max 100000", 8), ("300000 100000", 3), ("50000 100000", 1), (None, 8)]
)
def test_a_container_has_the_cores_of_its_limit(
    said: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(machine, "CPU_LIMIT", tmp_path / "cpu.max")
    if said:
        machine.CPU_LIMIT.write_text(f"{said}\n")
    assert machine.cores() == expected


@pytest.mark.parametrize(("torch", "is_known"), [("2.11.0+cu130", False), ("2.13.0", True), ("3.0.1", True)])
def test_slots_on_gpus_have_settings_of_their_own(monkeypatch: pytest.MonkeyPatch, torch: str, is_known: bool) -> None:
    monkeypatch.setattr(slots, "version", lambda _: torch)
    for name in slots.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    assert slots.settings("GPU") == (session.VARIABLES["GPU"] if is_known else {})
    assert slots.settings("CPU").keys() == {"MALLOC_MMAP_THRESHOLD_", "THP_MEM_ALLOC_ENABLE", "GOMP_SPINCOUNT"}
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert not slots.settings("GPU"), "the newer name would hide the user's own value"
