"""Machines of a rollout pool that grows and shrinks (`placement.pools[].maxNodes`), and copies of its responses."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import ray

from rlhf_api.names import POOL_RESOURCE
from rlhf_trainer.controller.resource_pool import LOOK_SECONDS, POOL_DEADLINE_SECONDS, RayNode, ResourcePool
from rlhf_trainer.errors import CommunicationError, EnvironmentProblem

ANSWER_SECONDS = 2.0
"""Seconds that a machine may take to accept a connection; later it counts as gone."""
RESERVE_SECONDS = 20.0
"""Seconds after which machines are chosen anew, as a chosen one may have gone."""


class TooFewNodesError(CommunicationError):
    """An elastic pool has had too few nodes for too long."""


class ElasticMachines:
    """Machines of an elastic pool, in use or free in Ray; each has the same number of slots."""

    def __init__(self, pool: ResourcePool, sizes: Sequence[int], say: Callable[[str], None]) -> None:
        """sizes: the allowed numbers of machines; say: tells the user a sentence."""
        self._pool, self._sizes, self._say = pool, sizes, say
        self._in_use = [machine for machine, _ in pool.machines()]
        """Ray's ids of the machines with the pool's processes, in the order of ranks."""

    @property
    def count(self) -> int:
        return len(self._in_use)

    def _find_alive(self) -> set[str]:
        """Return Ray's ids of machines that have all slots, do not drain, and answer (Ray sees a loss 10 s late)."""
        needs, slots = (f"{POOL_RESOURCE}{self._pool.name}", self._pool.device), self._pool.slots_per_machine[0]
        leaving = ray._private.state.state.get_draining_nodes()  # noqa: SLF001 SIGTERM drains a node
        there = ((node, map(node["Resources"].get, needs, (0, 0))) for node in ray.nodes() if node["Alive"])
        return {node["NodeID"] for node, has in there if min(has) >= slots and answers(node)}.difference(leaving)

    def _choose(self) -> list[str]:
        """Return as many living machines as the pool may have, those in use first; [] if there are too few."""
        alive = self._find_alive()
        ordered = [each for each in self._in_use if each in alive] + sorted(alive.difference(self._in_use))
        return ordered[: max((size for size in self._sizes if size <= len(ordered)), default=0)]

    def must_change(self) -> bool:
        """Whether a machine in use is lost, or the pool can have more machines."""
        return self._choose() != self._in_use

    def move(self) -> bool:
        """End the pool's processes and reserve its slots on the chosen machines; return whether they have changed.

        Waits for the smallest allowed number of machines. TooFewNodesError if they do not come in time.
        """
        before, until, name = self._in_use, time.monotonic() + POOL_DEADLINE_SECONDS, self._pool.name
        fewest = min(self._sizes)
        self._pool.release()
        if not self._choose():
            self._say(f"rollout pool {name} waits for {fewest} nodes")
        while not self._has_reserved(self._choose()):
            if time.monotonic() > until:
                has = f"rollout pool {name} has {len(self._find_alive())} of the {fewest} nodes that it needs at least"
                raise TooFewNodesError(f"{has}, {POOL_DEADLINE_SECONDS:.0f} s after it lost one")
            time.sleep(LOOK_SECONDS)
        if self._in_use != before:
            why = ", as one has gone" if self.count == len(before) else ""
            self._say(f"rollout pool {name}: {len(before)} -> {self.count} nodes{why}")
        return self._in_use != before

    def _has_reserved(self, chosen: list[str]) -> bool:
        """Reserve the pool's slots on these machines; return False if there are none, or Ray cannot."""
        if not chosen:
            return False
        self._pool.slots_per_machine = self._pool.slots_per_machine[:1] * len(chosen)
        with suppress(EnvironmentProblem):
            self._pool.reserve(deadline=RESERVE_SECONDS, machines=chosen)
            self._in_use = chosen
            return True
        return False


def elastic_machines(pool: ResourcePool, counts: Sequence[int], say: Callable[[str], None]) -> ElasticMachines | None:
    """Return the machines of an elastic pool; None if `counts` is empty, or no node has the pool's resource.

    The operator gives this resource to the nodes of its pods. counts: allowed numbers of machines; empty: not elastic.
    """
    if not counts:
        return None
    keeps = f"warning: rollout pool {pool.name} keeps its number of nodes ({counts[0]})"
    if (own := f"{POOL_RESOURCE}{pool.name}") not in ray.cluster_resources():
        say(f"{keeps}: no node of Ray has the resource {own}")
        return None
    if len(counts) == 1:
        say(f"{keeps}: no larger number up to maxNodes makes equal batches of a step's responses")
    return ElasticMachines(pool, counts, say)


def answers(node: RayNode) -> bool:
    """Whether Ray's process on a machine accepts a connection."""
    with suppress(OSError):
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWER_SECONDS).close()
        return True
    return False


def copy_here(references: Sequence[ray.ObjectRef]) -> None:
    """Have Ray copy objects to this machine once they are made; returns at once."""
    waits = {"num_returns": len(references), "fetch_local": True}
    threading.Thread(target=ray.wait, args=[list(references)], kwargs=waits, daemon=True).start()


def are_lost(references: Sequence[ray.ObjectRef], *, deadline: float) -> bool:
    """Wait up to `deadline` seconds until objects are copied to this machine; return whether one is lost."""
    core = ray._private.worker.global_worker.core_worker  # noqa: SLF001 `ray.get` would read the objects
    pending, until = list(references), time.monotonic() + deadline
    while pending and time.monotonic() < until:
        with suppress(ray.exceptions.GetTimeoutError):
            ((_, kind, _),) = core.get_objects(pending[-1:], 1000 * LOOK_SECONDS)
            if kind.split(b",")[0].isdigit():  # an error's metadata begins with its number
                return True
            pending.pop()
    return False
