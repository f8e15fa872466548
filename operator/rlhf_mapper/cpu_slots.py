"""Number of CPU slots of a machine for jobs that leave it open: slots share the cores, and each is a process."""

from collections.abc import Mapping, Sequence
from math import ceil

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import SpecError
from rlhf_api.tables import read_table
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.place import place
from rlhf_mapper.workload import workload_of

Shapes = Mapping[Role, Architecture]
COSTS = read_table(__package__, "cpu_slots.yaml", dict[str, float])
"""Seconds of a unit of each kind of work, and seconds and bytes of a process."""
UNITS = tuple(COSTS)[2:]
ERROR, MEMORY_SHARE, MAX_SLOTS = 0.05, 0.8, 8
"""Share of a run that more slots must save, share of the memory that a job may fill, and most slots to choose."""
WEIGHT, STATES = 4, 16
"""Bytes of a weight, and of a trained weight with its gradient and moments."""


def choose_slots(jobs: Sequence[tuple[Job, Shapes]], cores: int, memory: float) -> tuple[int, dict[int, float]]:
    """Return (chosen number of slots, possible number -> predicted seconds of all jobs, run one after the other).

    memory: bytes of the machine. A number is possible if it divides the cores and all batches, and memory suffices.
    The least is chosen if others save less than ERROR, or if jobs count epochs, as their steps are not known yet.
    """
    seconds, least = dict[int, float](), max(least_slots(job) for job, _ in jobs)
    for slots in range(least, max(min(cores, MAX_SLOTS), least) + 1):
        if slots == least or (cores % slots == 0 and all(_is_possible(*each, slots, memory) for each in jobs)):
            found = ((job.spec.training.total_steps or 0, amounts_of(job, own, slots, cores)) for job, own in jobs)
            working = sum(count * COSTS[unit] * amount for count, step in found for unit, amount in step.items())
            seconds[slots] = working + (slots - least) * COSTS["start_seconds"]
    best = min(seconds, key=lambda slots: seconds[slots])
    return best if seconds[best] < (1 - ERROR) * seconds[least] else least, seconds


def least_slots(job: Job) -> int:
    """Return the fewest slots on which a job runs: two if it generates in a pool of its own."""
    return 1 + ("rollout" in job.placed_roles())


def amounts_of(job: Job, shapes: Shapes, slots: int, cores: int, responses: Sequence[float] = ()) -> dict[str, float]:
    """Return kind of work -> its units in a step on a machine; all slots share the cores, and models work in turn."""
    load, found = workload_of(job, responses=responses), dict.fromkeys(UNITS, 0.0)
    prompt, response = load.prompt.mean, load.response
    for role, work in load.work.items():
        model = shapes["actor" if role == "rollout" else role]
        flops = 2 * (model.layers * model.active_layer_parameters + model.head_parameters) / cores
        bytes_, steps = WEIGHT * model.parameters, work.passes * response.longest
        found["decode_products"] += flops * work.generated * (prompt + response.mean)
        found["decode_layers"] += steps * model.layers
        found["sampled_tokens"] += work.generated / slots * response.mean
        found["decode_reads"] += steps * bytes_ * slots
        budget = (job.micro_batch_tokens("CPU", hidden=model.hidden),)
        for rows, updates, together, passes in (
            (work.read, 1, work.read_together, 1),
            (work.trained, max(work.updates, 1), work.trained_together, 3),  # a backward pass takes two
        ):
            count = passes * updates * ceil(rows / updates / slots / load.rows_within(budget, together)[0])
            found["products"] += passes * flops * rows * (prompt / together + response.mean)
            found["rows"] += passes * model.layers * rows / slots
            found["passes"] += count * model.layers
            found["exchanges"] += count * bytes_ * (slots - 1)
    return found


def _is_possible(job: Job, shapes: Shapes, slots: int, memory: float) -> bool:
    """Whether `slots` slots divide the batches, and have room for all states and a generator in each slot."""
    try:
        place(job.changed(resources={"slots_per_node": slots}), (0,))
    except SpecError:
        return False
    states = STATES * sum(model.parameters for model in shapes.values())
    processes = slots * (COSTS["process_bytes"] + WEIGHT * shapes[job.saved].parameters)
    return states + processes < MEMORY_SHARE * memory
