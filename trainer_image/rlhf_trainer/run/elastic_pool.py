"""Machines of a rollout pool that grows and shrinks (`placement.pools[].maxNodes`), and copies of its responses."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import ray

from rlhf_api.job import Job
from rlhf_api.names import POOL_RESOURCE
from rlhf_trainer.controller.resource_pool import LOOK_SECONDS, RayNode, ResourcePool
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run.slots import POOL_DEADLINE_SECONDS

ANSWER_SECONDS = 2.0
"""Seconds that a machine may take to accept a connection; one that does not has gone."""
RESERVE_SECONDS = 20.0
"""Seconds after which machines are chosen anew, as one that Ray was asked for may have gone."""


class ElasticMachines:
    """Machines of an elastic pool: those in use, and those that Ray has; each holds as many slots of the pool."""

    def __init__(self, pool: ResourcePool, sizes: Sequence[int], say: Callable[[str], None]) -> None:
        """sizes: the allowed numbers of machines; say: tells the user a sentence."""
        self._pool, self._sizes, self._say = pool, sizes, say
        self._resource = resource_of(pool.name)
        self._in_use = [machine for machine, _ in pool.machines()]
        """Ray's ids of the machines with the pool's processes, in the order of ranks."""

    @property
    def count(self) -> int:
        """Number of the machines in use."""
        return len(self._in_use)

    def _find_alive(self) -> set[str]:
        """Return Ray's ids of the pool's machines that answer: Ray takes ten seconds to see that one has gone."""
        found = [node for node in ray.nodes() if node["Alive"] and self._resource in node["Resources"]]
        return {node["NodeID"] for node in found if answers(node)}

    def _choose(self) -> list[str]:
        """Return the largest allowed number of the machines that are alive, those in use first; [] if too few are."""
        alive = self._find_alive()
        ordered = [each for each in self._in_use if each in alive] + sorted(alive.difference(self._in_use))
        return ordered[: max((size for size in self._sizes if size <= len(ordered)), default=0)]

    def must_change(self) -> bool:
        """Whether a machine in use has gone, or the pool can have more machines."""
        return self._choose() != self._in_use

    def has_lost_one(self) -> bool:
        """Whether a machine in use has gone."""
        return not self._find_alive().issuperset(self._in_use)

    def move(self) -> bool:
        """End the pool's processes and reserve its slots on the chosen machines; return whether these are others.

        Waits for the fewest machines. EnvironmentProblem if they do not come in time.
        """
        pool, before, fewest, until = (
            self._pool,
            self._in_use,
            min(self._sizes),
            time.monotonic() + POOL_DEADLINE_SECONDS,
        )
        slots = pool.slots_per_machine[:1]
        pool.release()
        while not (chosen := self._reserve(slots)):
            here = len(self._find_alive())
            if time.monotonic() > until:
                lacks = f"rollout pool {pool.name} has {here} of the {fewest} nodes that it needs at least"
                raise EnvironmentProblem(f"{lacks}, {POOL_DEADLINE_SECONDS:.0f} s after it lost one")
            time.sleep(LOOK_SECONDS)
        if chosen == before:
            return False
        new = len(set(chosen).difference(before))
        self._say(f"rollout pool {pool.name}: {len(before)} -> {len(chosen)} nodes, {new} of them new")
        return True

    def _reserve(self, slots: tuple[int, ...]) -> list[str]:
        """Reserve the pool's slots on the chosen machines and return these; [] if it cannot be done now."""
        with suppress(EnvironmentProblem):
            if chosen := self._choose():
                self._pool.slots_per_machine = slots * len(chosen)
                self._pool.reserve(deadline=RESERVE_SECONDS, machines=chosen)
                self._in_use = chosen
                return chosen
        return []


def elastic_machines(job: Job, pool: ResourcePool, say: Callable[[str], None]) -> ElasticMachines | None:
    """Return the machines of a pool if it is elastic and Ray's nodes name their pools; else None."""
    wanted = next((each for each in job.spec.placement.pools if each.name == pool.name and each.max_nodes), None)
    if wanted is None or resource_of(pool.name) not in ray.cluster_resources():
        return None
    return ElasticMachines(pool, job.sizes_of(wanted), say)


def fixed_pools(job: Job) -> Iterator[str]:
    """Yield a sentence for each pool that cannot grow though it has maxNodes."""
    for number, pool in enumerate(job.spec.placement.pools):
        path = f"spec.placement.pools[{number}].maxNodes"
        if (pool.max_nodes or 0) <= pool.nodes:
            continue
        if job.sizes_of(pool) == [pool.nodes]:
            whole = f"{job.sequences_per_step} sequences a step are no equal batches for engines on"
            yield f"{path}: {whole} {pool.nodes + 1} to {pool.max_nodes} nodes, so pool {pool.name} keeps {pool.nodes}"
        elif resource_of(pool.name) not in ray.cluster_resources():
            yield f"{path}: no node of Ray has the resource {resource_of(pool.name)}, so the pool keeps {pool.nodes}"


def resource_of(pool: str) -> str:
    """Return the name of the Ray resource that the nodes of a pool have."""
    return f"{POOL_RESOURCE}{pool}"


def answers(node: RayNode) -> bool:
    """Whether Ray's process on a machine accepts a connection."""
    with suppress(OSError):
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWER_SECONDS).close()
        return True
    return False


def copy_here(references: Sequence[ray.ObjectRef]) -> None:
    """Have Ray copy objects to this machine when they are made, without reading them; returns at once."""
    wait = partial(ray.wait, list(references), num_returns=len(references), fetch_local=True)
    threading.Thread(target=wait, daemon=True).start()


def are_here(references: Sequence[ray.ObjectRef], *, deadline: float) -> bool:
    """Wait until objects are on this machine; return whether all are, and none is lost."""
    missing, until = list(references), time.monotonic() + deadline
    while missing and time.monotonic() < until:
        _, missing = ray.wait(missing, num_returns=len(missing), timeout=LOOK_SECONDS, fetch_local=True)
    if missing:
        return False
    core = ray._private.worker.global_worker.core_worker  # noqa: SLF001 `ray.get` would read them
    kinds = [metadata.split(b",")[0] for _, metadata, _ in core.get_objects(list(references), 0)]
    return not any(kind.isdigit() for kind in kinds)  # the number of an error
