"""The processes of slots divide the machine's cores between them, and are bound to none."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from rlhf_api.spec.deadlines import CALL_SECONDS
from rlhf_mapper.mapping import DeviceMapping, MappedPool
from rlhf_trainer.controller.call_log import CallLog
from rlhf_trainer.controller.worker_group import ModelHandle
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.protocols import ONE_TO_ALL
from rlhf_trainer.run.slots import Slots
from rlhf_trainer.types import register

DEADLINE = float(CALL_SECONDS[1])
"""As of a job: pytest ends sooner what hangs, and a slot may start slowly beside other programs."""
SIZES = {"left": 1, "right": 1}


class Teller:
    """Says what its process computes with."""

    @register(ONE_TO_ALL)
    def tell(self) -> tuple[int, str, str, set[int], int]:
        """Torch's threads, what libraries are told of them, the cores that it may run on, and its niceness."""
        variables = os.environ["OMP_NUM_THREADS"], os.environ["GOMP_SPINCOUNT"]
        return torch.get_num_threads(), *variables, os.sched_getaffinity(0), os.nice(0)


@pytest.fixture
def slots(own_ray: None) -> Iterator[Slots]:  # noqa: ARG001
    made = Slots()
    yield made
    made.release()


def told(slots: Slots, folder: Path) -> list[Any]:
    """What the slots of all pools say."""
    placed = DeviceMapping(
        device="CPU",
        pools=tuple(
            MappedPool(name=name, models=("actor",), slots_per_machine=(size,)) for name, size in SIZES.items()
        ),
        sizes={},
    )
    with slots.held(placed, log=CallLog(), deadline=DEADLINE, stacks=folder, may_stay=False) as groups:
        answers = []
        for group in groups.values():
            group.build({"actor": WorkerSpec(Teller, {})})
            group.wait_until_built()
            teller: Any = ModelHandle(group, "actor", Teller)
            answers += teller.tell().result()
    return answers


def test_slots_of_all_pools_share_the_cores(slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(variable, raising=False)
    share = int(ray.cluster_resources()["CPU"]) // 2
    assert share > 1, "a share of one would tell nothing"
    everywhere, niceness = os.sched_getaffinity(0), os.nice(0)
    threads = min(share, psutil.cpu_count(logical=False))  # torch takes no more than there are
    assert told(slots, tmp_path) == [(threads, str(share), "1000", everywhere, niceness)] * 2
