"""A Ray of several machines on this one, and a job on it whose rollout pool `writers` grows and shrinks."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_mapper.place import place
from rlhf_trainer.run import worker_specs
from rlhf_trainer.run.on_ray import RayRuntime
from rlhf_trainer.run.slots import Slots
from rlhf_trainer.workers import rollout
from rlhf_trainer.workers.rollout import RolloutWorker
from tests.trainer.jobs import job
from tests.trainer.placement.sampler import PlainSampler, Row
from tests.trainer.placement.sweep import steps

POOL, MOST = "writers", 3
PROMPTS, SAMPLES = 4, 3
ROWS = PROMPTS * SAMPLES
"""Rows of a step; 1, 2 and 3 machines with a slot each get equal batches."""
TOKEN_SECONDS = 0.01
SETTINGS = {
    "max_direct_call_object_size": 100,  # bytes; Ray keeps larger objects on the machine of their maker
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}
"""Settings of Ray, which by default keeps objects below 100 KB with their reader, and notices losses late."""


class SlowSampler(PlainSampler):
    """Takes so long that a machine can be lost meanwhile."""

    def _write_token(self, row: Row) -> None:
        time.sleep(TOKEN_SECONDS)
        super()._write_token(row)


class SampledRollout(RolloutWorker):
    """Generates by a plain sampler in vLLM's place."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        setattr(rollout, "GenerationEngine", SlowSampler)  # noqa: B010
        super().__init__(*arguments, **named)


class Machines:
    """Machines of a Ray; the driver is on the head, which has no slots."""

    def __init__(self, writers: int) -> None:
        """writers: machines of the rollout pool at the start; the trainer has one."""
        ray.shutdown()  # of the tests before
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": SETTINGS}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._cluster.add_node(num_cpus=1, resources={"rlhf-pool-train": 1})
        self.writers: list[Any] = []
        for _ in range(writers):
            self.add()
        ray.init(address=self._cluster.address, log_to_driver=False)

    def add(self) -> None:
        """A machine joins the rollout pool."""
        self.writers.append(self._cluster.add_node(num_cpus=1, resources={f"rlhf-pool-{POOL}": 1}))

    def lose(self, machine: Any) -> None:
        """Send SIGKILL to all processes of a machine at once, as if its pod was lost."""
        (raylet,) = machine.all_processes["raylet"]
        family = psutil.Process(raylet.process.pid)
        for process in [family, *family.children(recursive=True)]:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        raylet.process.wait()

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def machines(writers: int) -> Iterator[Machines]:
    made = Machines(writers)
    try:
        yield made
    finally:
        made.close()


@dataclass
class Run:
    """Records and rows of a finished run."""

    records: list[dict[str, float]]
    rows: list[dict[str, Any]]
    """Rows that the actor has learned, with step, row, prompt and response."""
    said: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, records: list[dict[str, float]], folder: Path, said: Sequence[str] = ()) -> Run:
        rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().split("\n")[:-1]]
        return cls(records, rows, list(said))

    @property
    def learned(self) -> dict[tuple[int, int], tuple[str, str]]:
        """(step, row) -> (prompt, response); each is there once."""
        found = {(row["step"], row["row"]): (row["prompt"], row["response"]) for row in self.rows}
        assert len(found) == len(self.rows)
        return found

    def losses(self) -> list[dict[str, float]]:
        """Metrics of each step, except those that depend on the machines."""
        names = ("loss/", "grad_norm/", "reward/", "kl/", "response_length/")
        return [{name: value for name, value in each.items() if name.startswith(names)} for each in self.records]

    def total(self, name: str) -> int:
        return int(sum(record[name] for record in self.records))


def elastic_job(
    folder: Path,
    folders: Mapping[Role, str],
    *,
    count: int,
    staleness: int = 0,
    fewest: int = 1,
    prompts: int = PROMPTS,
    **rollout: Any,
) -> Job:
    """GRPO job that writes each learned row to a file; rollout: further fields of `spec.rollout`."""
    spec = {
        "algorithm": {"name": "GRPO", "kl": {"coefficient": 0.0}},
        "models": {
            "actor": {"uri": f"file://{folders['actor']}", "optimizer": {"learningRate": 1e-3}},
            "reward": {"entrypoint": "rlhf_examples.helpful.rule:score"},
        },
        "data": {
            "train": {"uri": "package://rlhf_examples/helpful/train.jsonl", "limit": 40},
            "maxPromptTokens": 16,
            "maxResponseTokens": 6,
        },
        "rollout": {"samplesPerPrompt": SAMPLES, "maxStaleness": staleness, "keep": 1.0, **rollout},
        "training": {"totalSteps": count, "promptBatchSize": prompts, "callDeadlineSeconds": 120},
        "resources": {"device": "CPU"},
        "placement": {
            "mode": "Manual",
            "pools": [
                {"name": "train", "models": ["actor"], "slotsPerNode": 1},
                {"name": POOL, "models": ["rollout"], "nodes": fewest, "maxNodes": MOST, "slotsPerNode": 1},
            ],
        },
    }
    return job(folder, "elastic", spec)


def run(
    folder: Path, one: Job, folders: Mapping[Role, str], change: Callable[[RayRuntime, pytest.MonkeyPatch], None]
) -> Run:
    """Run the steps of a job by the product's runtime; change: disturbs them."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_specs, "RolloutWorker", SampledRollout)
        patch.setenv("OMP_NUM_THREADS", "1")
        runtime = RayRuntime(one, place(one, (0,)), folders, slots=Slots(), path=folder)
        with runtime.running(say=said.append) as shape:
            change(runtime, patch)
            records = steps(one, runtime, shape.total_steps)
    return Run.of(records, folder, said)
