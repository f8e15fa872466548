"""A mistake in `maxNodes`, or the reason for which a pool keeps its size, is one sentence at the start."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rlhf_api.problems import SpecError
from rlhf_mapper.place import place
from rlhf_trainer.run import elastic_pool
from rlhf_trainer.run.elastic_pool import ElasticMachines, elastic_machines
from tests.trainer.elastic.machines import POOL, elastic_job

FOLDERS: Any = {"actor": "nowhere"}


def said(job: Any, monkeypatch: pytest.MonkeyPatch, *, resource: str) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(ray, "cluster_resources", lambda: {resource: 2.0})
    pool: Any = SimpleNamespace(name=POOL, machines=list)
    elastic_machines(pool, place(job, (0,)).pools[-1].allowed_machine_counts, found.append)
    return found


def test_batches_that_no_more_nodes_divide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = elastic_job(tmp_path, FOLDERS, count=1, samplesPerPrompt=7, prompts=1)
    why = "no larger number up to maxNodes makes equal batches of a step's responses"
    assert said(one, monkeypatch, resource=f"rlhf-pool-{POOL}") == [
        f"warning: rollout pool {POOL} keeps its number of nodes (1): {why}"
    ]


def test_nodes_that_do_not_say_their_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = elastic_job(tmp_path, FOLDERS, count=1)
    why = f"no node of Ray has the resource rlhf-pool-{POOL}"
    assert said(one, monkeypatch, resource="CPU") == [
        f"warning: rollout pool {POOL} keeps its number of nodes (1): {why}"
    ]


def test_a_pool_that_can_grow_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not said(elastic_job(tmp_path, FOLDERS, count=1), monkeypatch, resource=f"rlhf-pool-{POOL}")


def test_batches_that_the_fewest_nodes_do_not_divide(tmp_path: Path) -> None:
    one = elastic_job(tmp_path, FOLDERS, count=1, samplesPerPrompt=7, prompts=1, fewest=2)
    with pytest.raises(SpecError, match=r"promptBatchSize: gives 7 sequences, which do not divide by the 2 slots"):
        place(one, (0,))


def test_nodes_without_room_or_about_to_end_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool does not wait for slots that such nodes lack: the job would fail."""
    slots = [{f"rlhf-pool-{POOL}": own, "CPU": cpus} for own, cpus in ((2.0, 2.0), (1.0, 2.0), (2.0, 1.0), (2.0, 4.0))]
    nodes = [{"NodeID": str(number), "Alive": True, "Resources": each} for number, each in enumerate([*slots, {}])]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(elastic_pool, "answers", lambda _: True)
    leaving: dict[str, int] = {}
    monkeypatch.setattr(ray._private.state.state, "get_draining_nodes", lambda: leaving)
    pool: Any = SimpleNamespace(name=POOL, device="CPU", slots_per_machine=(2,), machines=lambda: [("0", 2)])
    assert not ElasticMachines(pool, [1, 3], lambda _: None).must_change()
    assert ElasticMachines(pool, [1, 2], lambda _: None).must_change()
    leaving["3"] = 0
    assert not ElasticMachines(pool, [1, 2], lambda _: None).must_change()
