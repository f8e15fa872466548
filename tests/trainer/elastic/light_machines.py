"""Machines of a Ray, played by the test: their processes are forked, and the test says which machines are alive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rlhf_api.names import POOL_RESOURCE
from rlhf_trainer.controller import resource_pool
from rlhf_trainer.controller.resource_pool import NODE_LABEL
from rlhf_trainer.run import elastic_pool, on_ray
from tests.trainer.elastic.machines import POOL
from tests.trainer.placement.light_ray import Actor, LightRay, Reference

TRAIN = "train"
"""Machine of the trainer."""
OWN = f"{POOL_RESOURCE}{POOL}"
"""Resource of the machines of the rollout pool."""
LOOK_SECONDS = 0.01


class LightMachines(LightRay):
    """Has the methods of `Machines`; a machine is a name, and a killed one leaves `ray.nodes()` at once."""

    def __init__(self, folder: Path, writers: int) -> None:
        super().__init__(folder)
        self.writers: list[str] = []
        self._alive: list[str] = []
        self._processes_on: dict[str, list[Any]] = {TRAIN: []}
        for _ in range(writers):
            self.add()

    def add(self) -> None:
        """A machine joins the rollout pool."""
        name = f"writer-{len(self._processes_on)}"
        self._processes_on[name] = []
        self.writers.append(name)
        self._alive.append(name)

    def lose(self, machine: str) -> None:
        """Send SIGKILL to all processes of a machine."""
        self._alive.remove(machine)
        for process in self._processes_on[machine]:
            process.kill()

    @contextmanager
    def patched(self) -> Iterator[None]:
        with super().patched(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray, "cluster_resources", lambda: {"CPU": len(self._alive) + 1, OWN: len(self._alive)})
            patch.setattr(ray, "nodes", self._nodes)
            patch.setattr(ray._private.state.state, "get_draining_nodes", dict)
            patch.setattr(resource_pool, "placement_group", self._group)
            patch.setattr(resource_pool, "placement_group_table", lambda group: {"bundles_to_node_id": [group.machine]})
            patch.setattr(elastic_pool, "answers", lambda _: True)
            patch.setattr(on_ray, "copy_here", lambda _: None)  # a file outlives the process that wrote it
            patch.setattr(on_ray, "are_lost", self._are_lost)
            patch.setattr(on_ray, "LOOK_SECONDS", LOOK_SECONDS)
            yield

    def _nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": name, "Alive": True, "Resources": {OWN: 1.0, "CPU": 1.0}} for name in self._alive]

    def _group(
        self, bundles: Sequence[Mapping[str, float]], *, bundle_label_selector: Any = None, **_: Any
    ) -> SimpleNamespace:
        """Return a placement group on the machine that the pool asks for, or on the first that suits."""
        suits = self._alive[0] if OWN in bundles[0] else TRAIN
        machine = bundle_label_selector[0][NODE_LABEL] if bundle_label_selector else suits
        return SimpleNamespace(machine=machine, wait=lambda _: machine in (TRAIN, *self._alive))

    def _start(self, actor_class: type, options: Mapping[str, Any], **arguments: Any) -> Actor:
        actor = super()._start(actor_class, options, **arguments)
        self._processes_on[options["scheduling_strategy"].placement_group.machine].append(actor.process)
        return actor

    def _are_lost(self, references: Sequence[Reference], *, deadline: float) -> bool:
        """Wait for objects; return whether a process has ended before it wrote its own."""
        try:
            self.get(references, timeout=deadline)
        except ray.exceptions.RayError:
            return True
        return False


@contextmanager
def light_machines(folder: Path, writers: int) -> Iterator[LightMachines]:
    made = LightMachines(folder, writers)
    with made.patched():
        yield made
