"""Number of CPU slots of a machine for jobs that leave it open: slots share the cores, and each is a process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import SpecError
from rlhf_api.tables import read_table
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import software_for
from rlhf_mapper.place import place
from rlhf_mapper.workload import Workload, workload_of

Shapes = Mapping[Role, Architecture]


@dataclass(frozen=True, kw_only=True)
class SlotCosts:
    """Costs of CPU slots; cpu_slots.yaml says what each unit of work is."""

    start_seconds: float
    process_bytes: float
    units: Mapping[str, float]
    """Seconds of one unit of work, by its name."""

    def seconds(self, amounts: Mapping[str, float]) -> float:
        """Return the seconds of so many units of work."""
        return sum(amount * self.units[name] for name, amount in amounts.items())


COSTS = read_table(__package__, "cpu_slots.yaml", SlotCosts)
ERROR = 0.1
"""Share of a run's seconds that more slots must save; less is within the error of these costs."""
MEMORY_SHARE = 0.8
"""Share of the machine's memory that processes, states and generators may fill."""
MAX_SLOTS = 8
"""Most slots that are chosen; the costs were measured with one and two."""
WEIGHT, BACKWARD = 4, 2
"""Bytes of a weight, and seconds of a backward pass over those of a forward pass."""


@dataclass(frozen=True, kw_only=True)
class CpuSlots:
    """Number of CPU slots, chosen for jobs that run one after the other in the same processes."""

    count: int
    threads: int
    """Threads of a slot."""
    step_seconds: Mapping[int, float]
    """Predicted seconds of all steps of the jobs over their number, by number of slots that was possible."""
    saved_seconds: float
    """Predicted seconds that the number saves in all, with the start of more processes; 0 for one slot."""


def choose_slots(jobs: Sequence[tuple[Job, Shapes]], cores: int, memory: float) -> CpuSlots:
    """Return the number of slots with which jobs take the fewest seconds; one if others save less than the error.

    memory: bytes of the machine. Numbers are tried that divide the cores and the batches of all jobs. Jobs that count
    epochs keep one slot, as their steps are not known before the data is read.
    """
    tried = [count for count in range(1, min(cores, MAX_SLOTS) + 1) if cores % count == 0]
    possible = [count for count in tried if count == 1 or _is_possible(jobs, count, memory)]
    steps = [job.spec.training.total_steps or 0 for job, _ in jobs]
    totals = {
        count: sum(
            number * COSTS.seconds(amounts_of(job, shapes, workload_of(job), count, cores))
            for number, (job, shapes) in zip(steps, jobs, strict=True)
        )
        for count in possible
    }
    runs = {count: seconds + (count - 1) * COSTS.start_seconds for count, seconds in totals.items()}
    best = min(runs, key=lambda count: runs[count])
    best = best if runs[best] < (1 - ERROR) * runs[1] else 1
    step_seconds = {count: seconds / max(sum(steps), 1) for count, seconds in totals.items()}
    return CpuSlots(count=best, threads=cores // best, step_seconds=step_seconds, saved_seconds=runs[1] - runs[best])


def amounts_of(job: Job, shapes: Shapes, load: Workload, slots: int, cores: int) -> dict[str, float]:
    """Return the units of work of a step, one after the other, on slots that share a machine's cores."""
    found, prompt, response = dict.fromkeys(COSTS.units, 0.0), load.prompt.mean, load.response
    for role, work in load.work.items():
        model = shapes[role]
        bytes_ = WEIGHT * model.parameters
        flops = 2 * (model.layers * model.active_layer_parameters + model.head_parameters) / cores
        steps = work.passes * response.longest
        found["decode_products"] += flops * work.generated * (prompt + response.mean)
        found["decode_layers"] += steps * model.layers
        found["sampled_tokens"] += work.generated / slots * response.mean
        found["decode_reads"] += steps * bytes_ * slots
        budget = (job.micro_batch_tokens("CPU", hidden=model.hidden),)
        for rows, updates, together, passes in (
            (work.read, 1, work.read_together, 1),
            (work.trained, max(work.updates, 1), work.trained_together, 1 + BACKWARD),
        ):
            count = passes * updates * ceil(rows / updates / slots / load.rows_within(budget, together)[0])
            found["products"] += passes * flops * rows * (prompt / together + response.mean)
            found["rows"] += passes * model.layers * rows / slots
            found["passes"] += count * model.layers
            found["exchanges"] += count * bytes_ * (slots - 1)
    return found


def _is_possible(jobs: Sequence[tuple[Job, Shapes]], slots: int, memory: float) -> bool:
    """Whether so many slots divide the batches of all jobs, and have room for each job's states and generators."""
    for job, shapes in jobs:
        try:
            place(job.with_resources(slots_per_node=slots), (0,))
        except SpecError:
            return False
        software = software_for("CPU", job.spec.training.precision)
        state = software.weight_bytes + software.gradient_bytes + software.optimizer_bytes
        states = sum(model.parameters for model in shapes.values()) * state
        generators = slots * (COSTS.process_bytes + WEIGHT * shapes[job.saved].parameters)
        if states + generators > MEMORY_SHARE * memory:
            return False
    return True
