"""Brings a job to life on Ray: pools, worker groups, and the models that the algorithm talks to."""

from __future__ import annotations

import gc
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.mapping import DeviceMapping, MappedPool
from rlhf_planning.mapped_fields import gpu_memory_utilization, micro_batch_tokens
from rlhf_trainer.controller.batch import BatchFuture
from rlhf_trainer.controller.payload import PayloadMeter
from rlhf_trainer.controller.worker_group import CallLog, ModelHandle, WorkerGroup, WorkerSpec
from rlhf_trainer.errors import DataError
from rlhf_trainer.hybrid_engine.hybrid_engine import Span
from rlhf_trainer.run.assembly import (
    RETOKENIZING,
    data_of,
    helpers_of,
    setting_of,
    stand_ins,
    worker_of,
)
from rlhf_trainer.run.graph import graph_of
from rlhf_trainer.run.lookahead import queue
from rlhf_trainer.run.rollout_pool import ReplaceableRolloutPool, Servers
from rlhf_trainer.run.slots import COLLECTIVE_DEADLINES, Slots
from rlhf_trainer.run.streaming import StreamingActor, scorers_of
from rlhf_trainer.run_folder.rollouts import ROLLOUTS
from rlhf_trainer.telemetry import ENDPOINTS, Report
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.data import DataShape
from rlhf_trainer.workers.judge import JudgeWorker
from rlhf_trainer.workers.keeper import RolloutKeeper
from rlhf_trainer.workers.responses import ResponseWriter
from rlhf_trainer.workers.retokenized import with_prompts


class RayRuntime:
    """A job's models, each on its pool, as the controller sees them: it holds references and never the bytes."""

    def __init__(
        self,
        job: Job,
        placed: DeviceMapping,
        folders: Mapping[Role, str],
        *,
        slots: Slots,
        stacks: Path,
        strangers: Collection[Role] = (),
    ) -> None:
        """folders: role -> local folder of its model, or its name on the hub; stacks: the file for those of a hang.

        strangers: the models whose tokenizer is not the actor's; `self.job` gives them the prompts as they stand.
        """
        self.models: dict[str, Any] = {}
        self.job = with_prompts(job) if strangers else job
        self._columns = job.spec.columns(job.spec.data.train)
        """Those that the manifest names."""
        self._placed, self._folders = placed, folders
        self._log, self._meter = CallLog(keeps=job.spec.rollout.max_staleness), PayloadMeter()
        self._deadline = float(job.spec.training.call_deadline_seconds)
        self._slots, self._stacks, self._strangers = slots, stacks, strangers
        self._groups: Mapping[str, WorkerGroup] = {}
        self._rollout_pool: ReplaceableRolloutPool | None = None

    @contextmanager
    def running(self, *, is_last: bool = True) -> Iterator[DataShape]:
        """Pools, processes and models exist while the block runs; gives what was found in the data.

        Afterwards the next job, unless this is the last, may have the processes, but for those on GPUs. A
        CommunicationError that leaves the block says which rank is to blame.
        """
        may_stay = self._placed.device == "CPU" and not is_last
        with (
            self._meter.watching(),
            self._slots.held(
                self._placed, log=self._log, deadline=self._deadline, stacks=self._stacks, may_stay=may_stay
            ) as self._groups,
        ):
            yield self._start()

    def blank(self, step: int, size: int) -> BatchFuture:
        """A batch of `size` rows that has no fields yet."""
        return BatchFuture(step=step, size=size)

    def send(self) -> None:
        """Have the ranks begin with all calls made so far."""
        self._log.send()

    def drain(self, step: int = 0) -> Sequence[Report]:
        """What every rank measured, and the payload bytes of this process."""
        reports = self._log.drain(deadline=self._deadline, step=step)
        if step and self._rollout_pool:
            reports.append(self._rollout_pool.drain())
        ahead = queue(self._log.undrained()) if step and self._log.keeps else {}
        return [*reports, Report(sums={"bytes/controller": float(self._meter.read()), **ahead})]

    def _start(self) -> DataShape:
        saved = self.job.saved
        home = next(pool for pool in self._placed.pools if saved in pool.models)
        setting = setting_of(self.job, saved, self._folders)
        slots = math.lcm(*(pool.size for pool in self._placed.pools))
        self._build(home.name, {"data": WorkerSpec(data_of(self.job), {"setting": setting, "slots": slots})})
        self._groups[home.name].wait_until_built()
        shape = agreed(self.job, self.models["data"].describe().result())
        for pool in self._placed.pools:
            self._build(pool.name, self._workers(pool, shape, is_home=pool is home))
        if self.job.generates_elsewhere:
            self._slots.beside(home.name, ENDPOINTS, log=self._log, deadline=self._deadline)
            asks = {"setting": setting_of(self.job, "rollout", self._folders), "on_gpu": self._placed.device == "GPU"}
            self._build(ENDPOINTS, {"rollout": WorkerSpec(worker_of(self.job, "rollout"), asks)})
        for group in self._groups.values():
            group.wait_until_built()
        servers = None
        if self.job.generates_elsewhere:
            servers = Servers(self.models["rollout"], partial(self._join_servers, home))
        elif self.job.generates_apart:
            self._span_rollout_pool(home)
            if not self.job.spec.rollout.stream:  # then scoring may have begun on some ranks when others lack rows
                self._rollout_pool = self._replaceable(home, shape)
        handles = dict(self.models)
        self.models.update(stand_ins(self.job, self.models, servers or self._rollout_pool))
        if self.job.spec.rollout.stream:
            self._stream(handles)
        self.drain()
        gc.freeze()  # else every full collection of a step looks through all that the imports have left
        return shape

    def _stream(self, handles: Mapping[str, Any]) -> None:
        """Have models of other pools score responses while further ones are generated, if there are any."""
        scorers = scorers_of(graph_of(self.job, self._placed))
        if any(scorers):
            self._log.streams.are_on = True
            self.models["actor"] = StreamingActor(self.models["actor"], handles, scorers, self._log.streams)

    def _replaceable(self, home: MappedPool, shape: DataShape) -> ReplaceableRolloutPool:
        """The pool that generates, whose workers can be made anew."""
        pool = self._generates
        group = self._groups[pool.name]

        def build() -> None:
            group.build(self._workers(pool, shape, is_home=False))
            group.wait_until_built()
            self._span_rollout_pool(home)

        return ReplaceableRolloutPool(group, self._log, deadline=self._deadline, build=build)

    @property
    def _generates(self) -> MappedPool:
        """The pool of a job that generates apart."""
        return next(pool for pool in self._placed.pools if "rollout" in pool.models)

    def _span_rollout_pool(self, trains: MappedPool) -> None:
        """Have the actor and the pool that generates form a group of both."""
        self._span_pools(trains, self._groups[self._generates.name].hosts, self._placed.sizes["rollout"])

    def _join_servers(self, trains: MappedPool, servers: Sequence[tuple[str, int]]) -> None:
        """The same for servers, each a machine and its ranks, which are as many in each."""
        hosts = [host for host, ranks in servers for _ in range(ranks)]
        self._span_pools(trains, hosts, ParallelSizes(data=len(servers), tensor=servers[0][1]))

    def _span_pools(self, trains: MappedPool, hosts: Sequence[str], generation: ParallelSizes) -> None:
        """Have the actor and its generators, each rank on its host, form a group."""
        group = self._groups[trains.name]
        address, port = group.rendezvous()
        span = Span(
            address=address,
            port=port,
            hosts=[*group.hosts, *hosts],
            training=self._placed.sizes["actor"],
            generation=generation,
            timeout_seconds=COLLECTIVE_DEADLINES * self._deadline,
        )
        with self._log.aside():
            for role in ("actor", "rollout"):
                self.models[role].span_pools(span=span)
        self._log.settle(deadline=self._deadline)

    def _build(self, pool: str, workers: Mapping[str, WorkerSpec]) -> None:
        group = self._groups[pool]
        group.build(workers)
        self.models.update(
            {role: ModelHandle(group, role, spec.worker_class, layout=spec.layout) for role, spec in workers.items()}
        )

    def _workers(self, pool: MappedPool, shape: DataShape, *, is_home: bool) -> dict[str, WorkerSpec]:
        """The workers of a pool's models; beside an RL job's actor also those of advantages and evaluation."""
        job, generates = self.job, not self.job.spec.algorithm.offline
        total_steps = job.total_steps_for(shape.rows)
        workers: dict[str, WorkerSpec] = {}
        for role in pool.models:
            layout = self._placed.sizes[role]
            setting = setting_of(job, role, self._folders, total_steps=total_steps, layout=layout)
            setting = with_mapped_fields(setting, self._placed)
            arguments: dict[str, Any] = {"setting": setting}
            if role == "rollout" or (generates and role == "actor"):
                generators = layout.data * layout.micro
                arguments["max_sequences"] = -(-max(job.sequences_per_step, shape.evaluation_rows) // generators)
            worker = worker_of(job, role, pool.models)
            if role in self._strangers:
                worker, actor = RETOKENIZING.get(worker, worker), (job.models()["actor"], self._folders["actor"])
                arguments["setting"] = replace(setting, actor=actor)
            workers[role] = WorkerSpec(worker, arguments, layout)
        if generates and is_home:
            setting = setting_of(job, job.saved, self._folders)
            folder = self._stacks.parent.resolve()
            for name, each in helpers_of(job).items():
                made = str(folder / job.spec.algorithm.makes)
                of_writer = {"setting": setting, "folder": made, "columns": self._columns}
                workers[name] = WorkerSpec(each, of_writer if each is ResponseWriter else {"job": job})
            workers["judge"] = WorkerSpec(JudgeWorker, {"setting": setting})
            if job.spec.rollout.keep:
                workers["rollouts"] = WorkerSpec(RolloutKeeper, {"setting": setting, "file": str(folder / ROLLOUTS)})
            if job.has_reward and "reward" not in job.models():  # it takes no slot of its own
                workers["reward"] = WorkerSpec(worker_of(job, "reward"), {"setting": setting})
        return workers


def agreed(job: Job, shapes: Sequence[DataShape]) -> DataShape:
    """What all ranks have found in the data; DataError where they have read other rows, or another order."""
    for path in shapes[0].digests:
        if len({shape.digests[path] for shape in shapes}) > 1:
            said = "has not the same rows, in the same order, for every rank; a function must not draw without its seed"
            raise DataError(f"{job.name}: {path}: {said}")
    return shapes[0]


def with_mapped_fields(setting: WorkerSetting, placed: DeviceMapping) -> WorkerSetting:
    """The setting with the micro-batch, offload, recomputation and cache that the mapper chose for the model on GPUs.

    What the manifest says itself stays; micro-batches only become smaller, so that they fit.
    """
    prediction, job = placed.prediction, setting.job
    if placed.device == "CPU" or prediction is None:
        return setting
    mapped, training, rollout = prediction.models[setting.role], job.spec.training, job.spec.rollout
    tokens = {"micro_batch_tokens": micro_batch_tokens(job, [mapped])}
    share = {"gpu_memory_utilization": gpu_memory_utilization(job, prediction)}
    fields = {"training": training.model_copy(update=tokens), "rollout": rollout.model_copy(update=share)}
    offload = mapped.offload if setting.model.offload == "None" else setting.model.offload
    asked = setting.model.gradient_checkpointing
    again = mapped.recomputes if asked is None else asked
    return replace(
        setting,
        job=job.model_copy(update={"spec": job.spec.model_copy(update=fields)}),
        model=setting.model.model_copy(update={"offload": offload, "gradient_checkpointing": again}),
    )
