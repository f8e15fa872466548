"""Runs a job on Ray: starts the workers of `worker_specs` on their pools, connects the models and takes the steps."""

import gc
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import ray

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_api.status import Metric
from rlhf_mapper.mapping import DeviceMapping
from rlhf_trainer.controller.batch import BatchFuture
from rlhf_trainer.controller.call_log import CallDeadline, CallLog
from rlhf_trainer.controller.resource_pool import LOOK_SECONDS
from rlhf_trainer.controller.worker_group import ModelHandle, WorkerGroup
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.errors import CommunicationError
from rlhf_trainer.hybrid_engine.hybrid_engine import Span
from rlhf_trainer.run.checkpoints import KeptCheckpoints
from rlhf_trainer.run.elastic_pool import ElasticMachines, TooFewNodesError, are_lost, copy_here
from rlhf_trainer.run.evaluation import evaluation_of
from rlhf_trainer.run.graph import recorded_step, scorers_of
from rlhf_trainer.run.job_run import run_job
from rlhf_trainer.run.placement import Placed
from rlhf_trainer.run.preconditions import other_vocabularies
from rlhf_trainer.run.publisher import Publisher, RunContext
from rlhf_trainer.run.resume import Start
from rlhf_trainer.run.slots import COLLECTIVE_DEADLINES, Slots
from rlhf_trainer.run.step_models import Handle, RolloutPool, connected, step_models_of, with_calls
from rlhf_trainer.run.worker_specs import agreed, data_spec, home_of, with_routing, worker_specs
from rlhf_trainer.run_folder.commands import STACKS
from rlhf_trainer.run_folder.folder import JobFolder, add_to_summary, with_written_data
from rlhf_trainer.telemetry import CONTROLLER, ENDPOINTS, Report
from rlhf_trainer.training import compression
from rlhf_trainer.training.link_probe import look_at_links, slowest_network
from rlhf_trainer.workers.data import DataShape
from rlhf_trainer.workers.retokenized import with_prompts

REPLACEMENTS, RESIZES, REPEATED = "rollout_replacements", "rollout_resizes", "rollout_repeated_rows"
NODES = "rollout_nodes"
MAX_REPLACEMENTS = 3
"""Most replacements in a row without responses in between; the next loss ends the attempt."""


def run_on_ray(
    job: Job,
    placed: Placed,
    folders: Mapping[Role, str],
    *,
    start: Start,
    slots: Slots,
    is_last: bool,
    context: RunContext,
) -> None:
    """Run one job into its folder and add its measures to summary.json."""
    own = JobFolder(context.output, job)
    publisher = Publisher(job, own, context.display, context.listeners_of, pause=context.stop.ask_to_pause)
    folder, checkpoint, mapping = publisher.folder, start.checkpoint, placed.mapping
    with publisher.recording_the_end():
        folder.begin(checkpoint, inputs=start.inputs, evidence=start.evidence, mapping=mapping)
        publisher.warn(*start.warnings)
        pools = " | ".join(map(mapping.described, mapping.pools))
        publisher.say(f"{job.spec.algorithm.name} on {pools}", *placed.notes, *compression.in_words(job, mapping.sizes))
        if checkpoint:
            publisher.say(f"goes on after step {checkpoint.step}, from {checkpoint.uri}")
        models = job.models()
        trained = [role for role, model in models.items() if model.optimizer]
        retokenized = other_vocabularies(job, models, folders)
        running = with_written_data(job, context.output)
        running = with_prompts(running) if retokenized else running
        columns = job.spec.columns(job.spec.data.train)
        runtime = RayRuntime(
            running, mapping, folders, slots=slots, path=folder.path, columns=columns, retokenized=retokenized
        )
        with runtime.running(is_last=is_last, say=publisher.say, warn=publisher.warn) as shape:
            end_hashing = start.begin_hashing(folder)
            seconds = runtime.links.items()
            folder.note(links=tuple(Metric(name=name, value=f"{each:.2g}") for name, each in seconds))
            if runtime.step_deadline.is_derived:
                folder.event(str(runtime.step_deadline))
            checkpoints = KeptCheckpoints(
                job, folder, runtime.models, trained, data=shape, stop=context.stop, start=start
            )
            checkpoints.set_pace(runtime.network)
            summary = run_job(
                running,
                runtime,
                shape,
                saves=(job.saved, folder.made.resolve()) if trained else None,
                evaluation=(evaluation := evaluation_of(running, runtime, shape)),
                checkpoints=checkpoints,
                reporter=publisher,
            )
        end_hashing(shape.total_steps)
        add_to_summary(context.output, job.name, summary)
        folder.note_measures({each: summary.get(f"{each}_after", summary.get(each)) for each in evaluation.measures()})


class RayRuntime:
    """Runtime of a job: its models, each on its pool; the controller holds references to tensors, never their bytes."""

    def __init__(
        self,
        job: Job,
        placed: DeviceMapping,
        folders: Mapping[Role, str],
        *,
        slots: Slots,
        path: Path,
        columns: Collection[str] = (),
        retokenized: Collection[Role] = (),
    ) -> None:
        """folders: the local folders or hub names of the job's models, by role; path: the job's folder.

        columns: names of columns that a written data set gets; retokenized: models whose tokenizer is not the actor's.
        """
        self.models: dict[str, Handle] = {}
        """Handles of the models by role, with calls replaced as the job's options require (see `connected`)."""
        self.step_models: dict[str, Handle] = {}
        """Models that the algorithm's step takes, by parameter."""
        self.links: dict[str, float] = {}
        """Seconds that the slowest rank of a trained model took for each probe of `link_probe`, by `model/probe`."""
        self.network = math.inf
        """Bytes per second of the slowest link between machines; inf if no pool of a trained model has two."""
        self._job, self._placed, self._folders, self._slots, self._path = job, placed, folders, slots, path
        self._columns, self._retokenized = columns, retokenized
        self._log = CallLog(keeps=job.spec.rollout.max_staleness)
        self._deadline = float(job.spec.training.call_deadline)
        self.step_deadline = CallDeadline(
            self._deadline,
            predicted=placed.prediction.step_seconds if placed.prediction and job.derives_call_deadline else None,
            least=job.least_call_deadline,
        )
        self._step_began = 0.0
        self._groups: Mapping[str, WorkerGroup] = {}
        self._handles: dict[str, ModelHandle] = {}
        """Handles of all workers by role, without replaced calls."""
        self._home = ""
        """Name of the pool of the job's saved model; workers without a model of their own live there, too."""
        self._replaceable: ReplaceablePool | None = None

    @contextmanager
    def running(
        self,
        *,
        is_last: bool = True,
        say: Callable[[str], None] = lambda _: None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> Iterator[DataShape]:
        """Run the block with pools, processes and models; yield the shape of the data.

        say and warn: tell the user a sentence; warnings are kept in the status.
        Afterwards the next job may take over the processes, unless this job is the last or runs on GPUs. A
        CommunicationError that leaves the block says which rank is to blame.
        """
        is_elastic = any(pool.allowed_machine_counts for pool in self._placed.pools)  # the pool's size may have changed
        may_stay = self._placed.device == "CPU" and not is_last and not is_elastic
        with self._slots.held(
            self._placed, log=self._log, deadline=self._deadline, stacks=self._path / STACKS, may_stay=may_stay
        ) as self._groups:
            yield self._start(say, warn)

    def blank(self, step: int, size: int) -> BatchFuture:
        return BatchFuture(step=step, size=size)

    def send(self) -> None:
        self._log.send()

    def drain(self, step: int = 0) -> Sequence[Report]:
        """Wait for the calls up to a step; return what every rank measured, and the payload bytes of this process."""
        reports = self._log.drain(deadline=self.step_deadline.seconds if step else self._deadline, step=step)
        if step and self._step_began:
            self.step_deadline.note_step(time.monotonic() - self._step_began)
        self._step_began = time.monotonic()
        if step and self._replaceable:
            reports.append(self._replaceable.drain())
        ahead = self._log.queue() if step and self._log.keeps else {}
        return [*reports, Report(sums={"bytes/controller": float(self._log.meter.read()), **ahead})]

    def _start(self, say: Callable[[str], None], warn: Callable[[str], None]) -> DataShape:
        """Build the workers of all pools, connect the models, time their links, and return the shape of the data."""
        job, placed = with_routing(self._job, self._folders, self._placed, say), self._placed
        self._home = home_of(job, placed)
        home = self._groups[self._home]
        self._handles = home.build({"data": data_spec(job, placed, self._folders)})
        home.wait_until_built()
        shape = agreed(job, self._handles["data"].call("describe").result())
        specs_of = partial(worker_specs, path=self._path, columns=self._columns, retokenized=self._retokenized)
        specs = specs_of(job, placed, self._folders, shape)
        if job.generates_elsewhere:
            self._slots.beside(self._home, ENDPOINTS, log=self._log, deadline=self._deadline)
        for pool, workers in specs.items():
            others = {role: spec for role, spec in workers.items() if role not in self._handles}
            self._handles |= self._groups[pool].build(others)
        for group in self._groups.values():
            group.wait_until_built()
        rollout_pool = self._rollout_pool(lambda: specs_of(job, self._placed, self._folders, shape), say)
        self.drain()
        scorers = scorers_of(recorded_step(job, placed, specs)) if job.spec.rollout.stream else ()
        self._log.streams.are_on = any(scorers)
        self.models = connected(job, self._handles, rollout_pool, scorers=scorers, streams=self._log.streams)
        self.step_models = step_models_of(job, self.models)
        for role in job.trained():
            speeds = self.models[role].probe_links().result()
            seconds, slow = look_at_links(speeds, device=placed.device)
            self.network = min(self.network, slowest_network(speeds, device=placed.device))
            self.links |= {f"{role}/{name}": slowest for name, slowest in seconds.items()}
            for each in slow:
                warn(f"{role}: {each}")
        gc.freeze()  # else each full garbage collection scans all objects of the imports
        return shape

    def _rollout_pool(
        self, specs_now: Callable[[], Mapping[str, Mapping[str, WorkerSpec]]], say: Callable[[str], None]
    ) -> RolloutPool:
        """Return the pool or servers that generate for the actor; a plain RolloutPool if the actor itself generates."""
        if self._job.generates_elsewhere:
            servers: RolloutPool = with_calls(RolloutPool(), gather=self._join_servers)
            return servers  # weights go to the servers that are reachable
        if not self._job.generates_apart:
            return RolloutPool()
        pool = next(pool for pool in self._placed.pools if "rollout" in pool.models)
        name, group = pool.name, self._groups[pool.name]
        machines = self._slots.machines_of(pool, say)

        def join() -> None:
            self._span_pools(group.hosts, self._placed.sizes["rollout"])

        def rebuild() -> None:
            if machines:
                self._placed = self._placed.with_machines(name, machines.count)
            group.build(specs_now()[name])
            self._handles["rollout"].layout = self._placed.sizes["rollout"]
            group.wait_until_built()
            join()

        join()
        if self._job.spec.rollout.stream:  # not replaced: some ranks may be scoring while others lack rows
            return RolloutPool()
        self._log.abort = self._groups[self._home].abort_exchange
        self._replaceable = ReplaceablePool(
            group, self._log, deadline=self.step_deadline, build=rebuild, machines=machines
        )
        return self._replaceable

    def _join_servers(self) -> None:
        """Join the actor's ranks and the servers, if the servers have changed; the next exchange brings all weights."""
        servers = self._handles["rollout"].call("found").result()[0]  # (host, ranks); all have the same number of ranks
        if servers:
            hosts = [host for host, ranks in servers for _ in range(ranks)]
            self._span_pools(hosts, ParallelSizes(data=len(servers), tensor=servers[0][1]), in_ray=False)

    def _span_pools(self, hosts: Sequence[str], generation: ParallelSizes, *, in_ray: bool = True) -> None:
        """Join the actor's ranks and the generating ranks (on `hosts`) in one torch.distributed group.

        in_ray: whether a pool of Ray generates; servers outside Ray are assumed to be on other machines.
        """
        group = self._groups[self._home]
        span = Span(
            meeting=group.rendezvous(is_near=in_ray and len({*group.hosts, *hosts}) == 1),
            hosts=[*group.hosts, *hosts],
            training=self._placed.sizes["actor"],
            generation=generation,
            timeout_seconds=COLLECTIVE_DEADLINES * self._deadline,
        )
        with self._log.aside():
            for role in ("actor", "rollout"):
                self._handles[role].call("span_pools", span=span)
        self._log.settle(deadline=self._deadline)


class ReplaceablePool(RolloutPool):
    """Pool whose processes are all replaced if one is lost, because the ranks of an engine need each other."""

    def __init__(
        self,
        group: WorkerGroup,
        log: CallLog,
        *,
        deadline: CallDeadline,
        build: Callable[[], None],
        machines: ElasticMachines | None = None,
    ) -> None:
        """build: builds the workers of the group, and joins them with the actor's ranks.

        machines: machines of an elastic pool; None: Ray chooses where new processes run.
        """
        self._group, self._log, self._deadline, self._build = group, log, deadline, build
        self._machines = machines
        self._in_a_row = self._resizes = 0
        self._report = Report(sums={REPLACEMENTS: 0.0})

    def calls(self) -> AbstractContextManager[None]:
        return self._log.aside()

    def settle(self, step: int | None = None) -> None:
        is_evaluation = step is not None and step <= 0
        deadline = self._deadline.of_others if is_evaluation else self._deadline.seconds
        self._log.settle(deadline=deadline, step=step)
        if step is not None:
            self._in_a_row = 0

    def gather(self) -> None:
        """Move an elastic pool if its machines must change; raise CommunicationError if a rank has died meanwhile.

        Without that error the actor's ranks would wait for the dead rank in the exchange of weights.
        """
        if self._machines and self._machines.must_change():
            self._log.settle(deadline=self._deadline.seconds)  # with `rollout.partial` calls are still running
            self._renew()
        elif dead := self._dead_ranks():
            raise CommunicationError(", ".join(dead))

    def copy(self, responses: BatchFuture) -> None:
        if self._machines:
            copy_here(self._blocks(responses))

    def has_lost(self, responses: BatchFuture) -> bool:
        return self._machines is not None and are_lost(self._blocks(responses), deadline=self._deadline.seconds)

    def _blocks(self, responses: BatchFuture) -> list[ray.ObjectRef]:
        """Return references to the rows that the pool's processes have put into Ray's object store."""
        made = (each for each in responses.fields.values() if each.holders.pool == self._group.name)
        return [block.reference for each in made for block in each.blocks]

    def _dead_ranks(self) -> list[str]:
        return [str(rank) for rank in self._group.inspect() if rank.is_dead]

    def drain(self) -> Report:
        """Return a report of the replacements and changes of size since the last call of `drain`."""
        report, self._report = self._report, Report(sums={REPLACEMENTS: 0.0})
        if self._machines:
            report.sums |= {RESIZES: float(self._resizes), REPEATED: float(self.repeated_rows)}
            report.maxima[NODES] = float(self._machines.count)
            if count := self.repeated_rows:
                lost = f"rollout pool {self._group.name} lost processes"
                report.warnings[REPEATED] = f"{lost}; {count} rows were generated again"
            self._resizes = self.repeated_rows = 0
        return report

    def replace(self, error: CommunicationError) -> None:
        """Replace the processes; raise the error if no rank died, or after MAX_REPLACEMENTS without a response."""
        if isinstance(error, TooFewNodesError):
            raise error
        if self._machines:
            time.sleep(LOOK_SECONDS)  # the pool's processes may end before Ray's own on that machine
        if not (self._machines and self._machines.must_change()):
            lost = self._dead_ranks()
            if not lost or self._in_a_row == MAX_REPLACEMENTS:
                raise error
            self._in_a_row += 1
            self._report.sums[REPLACEMENTS] += 1
            then = "new processes generate again what was under way"
            self._report.warnings[REPLACEMENTS] = f"{', '.join(lost)}; {then}"
        try:
            self._renew()
        except CommunicationError as another:
            self.replace(another)

    def _renew(self) -> None:
        """Start new processes (for an elastic pool on its current machines), and build their workers."""
        with self._log.recorder.span(CONTROLLER, f"replace the processes of {self._group.name}"):
            self._resizes += bool(self._machines and self._machines.move())
            self._group.restart()
            self._log.abandon(deadline=self._deadline.seconds)
            self._build()
