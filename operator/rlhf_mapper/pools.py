"""Seconds of a pool's stages by number of GPUs: states take memory first, then strategies must fit beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from rlhf_api.names import Role
from rlhf_mapper.hardware import Cluster, NodeGroup
from rlhf_mapper.kernels import Numbers
from rlhf_mapper.mapping import PLACED_WITH, Device, DeviceMapping
from rlhf_mapper.search.objective import Objective
from rlhf_mapper.search.tables import StageTable
from rlhf_mapper.simulate import layer, memory, overlap
from rlhf_mapper.strategy import ACTIVATION_SHARES, GeneratingStrategies, Indices, ModelRequest, Setting, Strategies

BATCH_BYTES = 16
"""Bytes that a pool without the generator fetches for each token of the batch: token, mask and two numbers."""


def pool_sizes(nodes: NodeGroup) -> Indices:
    """Return pool sizes in GPUs: parts that can fill a node together, and full nodes; over two zones only all GPUs."""
    if nodes.spans_zones:
        return np.array([nodes.gpus])
    part, parts = nodes.gpus_per_node, []
    while part % 2 == 0:
        part //= 2
        parts.append(part)
    if part > 1:
        parts.append(1)
    return np.array([*sorted(parts), *(nodes.gpus_per_node * count for count in range(1, nodes.count + 1))])


MAX_RESULTS = 400
"""Most results of a kind that a mapping problem keeps: those of node groups with 2,048 GPUs take 22 MB."""
PoolOffload = Literal["None", "All", "OptimizerInHost"]
"""Model states that a pool keeps in host memory: none, those of idle models, or always those of the optimizer."""


@dataclass(frozen=True)
class StateChoice:
    """Way to keep the states of a pool's models, on GPUs or in host memory; its arrays have K pool sizes."""

    least: int
    """Smallest p x t of the cuts to choose from; it matters if data-parallel ranks do not shard the states."""
    offload: PoolOffload
    room: Indices
    """Index into ACTIVATION_SHARES of the share for activations, by pool size [K]; -1: the states do not fit."""
    cache: Numbers
    """Bytes of a GPU for the KV cache: [G generation cuts, K pool sizes]; [0, K] without a generator."""
    generator: Indices
    """Index of the fastest generation cut (p_g, t_g), by pool size: [K]."""
    pinned: Numbers
    """Bytes of host memory for each GPU, by pool size: [K]."""
    seconds: Numbers
    """Seconds of generation, preparation, training and transition by pool size, [4, K]; inf where models do not fit."""


def offload_seconds(request: ModelRequest, parts: Mapping[memory.Part, Numbers], setting: Setting) -> Numbers:
    """Return the seconds to copy an offloaded model's states to the GPU and back: [3 stages, K pool sizes].

    The stages are generation, preparation and training. parts: bytes of a GPU for each part of the states, [K] each.
    """
    work, there_and_back = request.work, 2 / setting.nodes.gpu.host_bandwidth
    weights = parts["weights"] * there_and_back
    moments = parts.get("optimizer", 0 * weights) * there_and_back
    uses = (weights * bool(work.generated), weights * bool(work.read), (weights + moments) * bool(work.trained))
    return np.stack(uses)


NodesKey = tuple[NodeGroup, tuple[int, ...]]
"""Key of simulated results: node group, and pool sizes in GPUs."""


@dataclass(frozen=True)
class Simulated:
    """Results of simulations and searches of one mapping problem on all clusters that were asked about."""

    strategies: dict[tuple[ModelRequest, NodesKey, int], Strategies] = field(default_factory=dict)
    tables: dict[tuple[frozenset[str], NodesKey], StageTable] = field(default_factory=dict)
    choices: dict[tuple[frozenset[str], NodesKey], list[StateChoice]] = field(default_factory=dict)
    mappings: dict[tuple[Cluster, Device, Objective], DeviceMapping | None] = field(default_factory=dict)
    fits: dict[Cluster, bool] = field(default_factory=dict)

    def clear(self) -> None:
        for results in vars(self).values():
            results.clear()


class PoolCosts:
    """Stage costs of every set of models on every node group; a strategy is simulated once for all sets."""

    def __init__(
        self,
        requests: Mapping[Role, ModelRequest],
        settings: Sequence[Setting],
        sizes: Sequence[Indices],
        hosts: Sequence[frozenset[tuple[int, str]]] | None = None,
        simulated: Simulated | None = None,
    ) -> None:
        """Keep the settings, pool sizes in GPUs, and hosts of the node groups; hosts None: groups share no nodes.

        simulated: results of other clusters with the same requests, workload and software.
        """
        self.requests, self.settings, self.sizes = requests, settings, sizes
        self.hosts = hosts or [frozenset({(group, "")}) for group in range(len(settings))]
        self._generating = {role for role, request in requests.items() if request.work.generated}
        self._simulated = Simulated() if simulated is None else simulated
        pairs = zip(settings, sizes, strict=True)
        self._keys = [(setting.nodes, tuple(each.tolist())) for setting, each in pairs]
        # Host memory limits what is offloaded, but changes no strategy.
        self._strategy_keys = [(replace(nodes, host_memory=None), each) for nodes, each in self._keys]

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(setting.nodes.gpus for setting in self.settings)

    def of(self, models: frozenset[str], group: int) -> StageTable:
        """Return the stage seconds of a set of models by pool size, each with the fastest way to keep the states."""
        key, tables = (models, self._keys[group]), self._simulated.tables
        if key not in tables:
            seconds = np.stack([choice.seconds for choice in self._state_choices(models, group)])
            best = np.argmin(seconds.sum(axis=1), axis=0)
            chosen = np.take_along_axis(seconds, best[None, None, :], axis=0)[0]
            tables[key] = StageTable(self.sizes[group], self._staged(models, group, chosen))
        return tables[key]

    def chosen(self, models: frozenset[str], group: int, gpus: int) -> tuple[StateChoice, int]:
        """Return (fastest way to keep the states in a pool of `gpus` GPUs, index of this size in the way's arrays)."""
        size = int(np.searchsorted(self.sizes[group], gpus))
        choices = self._state_choices(models, group)
        return min(choices, key=lambda choice: float(choice.seconds[:, size].sum())), size

    def seconds(self, models: frozenset[str], group: int, gpus: int) -> Numbers:
        """Return the seconds of one pool as in `StateChoice`: [4]."""
        choice, size = self.chosen(models, group, gpus)
        return choice.seconds[:, size]

    def stages(self, models: frozenset[str], group: int, gpus: int) -> Numbers:
        """Return the seconds of one pool by stage of the search: [S]."""
        return self._staged(models, group, self.seconds(models, group, gpus))

    def _staged(self, models: frozenset[str], group: int, seconds: Numbers) -> Numbers:
        generates = not self._generating.isdisjoint(self.roles_of(models))
        return overlap.stages_of(seconds, self.settings[group].load, generates=generates)

    def roles_of(self, models: frozenset[str]) -> tuple[Role, ...]:
        """Return the models of a pool in the order of `requests`, and the models that are always placed with them."""
        return tuple(role for role in self.requests if PLACED_WITH.get(role, role) in models)

    def strategies(
        self, role: Role, models: frozenset[str], group: int, least: int, offload: PoolOffload = "None"
    ) -> Strategies:
        """Return the strategies of one model in a pool of `models`; roles with equal requests share one object."""
        request = self.requests[role]
        if request.work.read_apart and "actor" in models:
            request = replace(request, work=replace(request.work, read=0.0))
        if offload == "OptimizerInHost" and request.work.trained:
            request = replace(request, work=replace(request.work, steps_in_host=True))
        key, known = (request, self._strategy_keys[group], least), self._simulated.strategies
        if key not in known:
            kind = GeneratingStrategies if request.work.generated else Strategies
            known[key] = kind(request, self.settings[group], self.sizes[group], least=least)
        return known[key]

    def states(self, role: Role, group: int, offload: PoolOffload = "None") -> dict[memory.Part, float]:
        """Return the bytes of a model's weights, gradients and optimizer on all GPUs that share one copy of weights."""
        request = self.requests[role]
        if request.work.receives_weights or (offload == "OptimizerInHost" and request.work.trained):
            return {"weights": 0.0}
        work, setting = request.work, self.settings[group]
        trains, compresses = work.trained > 0, work.compresses(over_thin_link=setting.nodes.has_thin_link)
        share = work.trained_share
        return memory.states(request.model, setting.software, trains=trains, trained_share=share, compresses=compresses)

    def _state_choices(self, models: frozenset[str], group: int) -> list[StateChoice]:
        """Return the ways to keep the states: one for each smallest p x t, and for each use of host memory."""
        key, choices = (models, self._keys[group]), self._simulated.choices
        if key not in choices:
            software, largest = self.settings[group].software, self.sizes[group].max(initial=1)
            leasts = [1] if software.shards_weights else [2**power for power in range(11) if 2**power <= largest]
            choices[key] = [
                self._choice(models, group, least, offload)
                for offload in self._offloads(models, group)
                for least in (leasts if offload == "None" else [1])
            ]
        return choices[key]

    def _offloads(self, models: frozenset[str], group: int) -> list[PoolOffload]:
        """Return the uses of host memory that the manifest leaves open for a pool of `models`."""
        roles = self.roles_of(models)
        fixed = {self.requests[role].offload for role in roles} - {"None"}
        if not self.settings[group].software.may_offload:
            return ["None"]
        if "OptimizerInHost" in fixed:
            return ["OptimizerInHost"]
        if fixed:
            return ["All"]
        is_trained = any(self.requests[role].work.trained for role in roles)
        return ["None", "All", "OptimizerInHost"] if is_trained else ["None", "All"]

    def _choice(self, models: frozenset[str], group: int, least: int, offload: PoolOffload) -> StateChoice:
        setting, gpus, offloads = self.settings[group], self.sizes[group], offload == "All"
        whole, q = gpus.astype(float), setting.nodes.gpu.memory
        roles = self.roles_of(models)
        parts = {
            role: memory.parts_of_gpu(
                self.states(role, group, offload),
                setting.software,
                replica=least,
                gpus=whole / self.requests[role].replicas,
            )
            for role in roles
        }
        states = [np.sum(list(each.values()), axis=0) for each in parts.values()]
        together = np.max(states, axis=0) if offloads else np.sum(states, axis=0)
        generates = not self._generating.isdisjoint(roles)
        usable = memory.usable(setting.software, q, gpus, generates=generates)
        room = np.searchsorted(ACTIVATION_SHARES, (usable - together) / q + 1e-9, side="right") - 1
        fits = together <= setting.software.state_share * q
        offloaded = roles if offload != "None" else ()
        pinned = sum((_pinned(self.requests[role], setting, whole, offload) for role in offloaded), start=0.0 * whole)
        fits &= pinned <= memory.HOST_SHARE * setting.nodes.host
        room = np.where(fits, room, -1)
        seconds = np.zeros((4, len(gpus)))
        cache, generator = np.zeros((0, len(gpus))), np.zeros(len(gpus), dtype=np.int64)
        for role in roles:
            strategies = self.strategies(role, models, group, least, offload)
            if strategies.is_empty:
                seconds[:] = np.inf
            elif isinstance(strategies, GeneratingStrategies):
                cache = strategies.cache(together)
                if offloads:  # the GPU holds weights and generator together, then generator and cache
                    resharding = strategies.cache(parts[role]["weights"])
                    cache = np.where(resharding >= 0, strategies.cache(0 * whole), -1.0)
                generator, found = strategies.with_generator(room, cache)
                seconds += found
            else:
                seconds += strategies.without_generator(room)
            seconds[:3] += offload_seconds(strategies.request, parts[role], setting) * offloads
        if self._generating and self._generating.isdisjoint(roles):
            seconds[1] += _batch_seconds(setting, gpus)
        return StateChoice(least, offload, room, cache, generator, pinned, np.where(room < 0, np.inf, seconds))


def _pinned(request: ModelRequest, setting: Setting, gpus: Numbers, offload: PoolOffload) -> Numbers:
    """Return the bytes of pinned host memory for a GPU's part of a model's states (and gradients) in host memory."""
    software, share = setting.software, request.work.trained_share
    unsent = [layer.FLOAT] * request.work.compresses(over_thin_link=setting.nodes.has_thin_link)
    gradients = [software.gradient_bytes] * (offload == "OptimizerInHost")
    trained = [software.weight_bytes, *[software.optimizer_bytes / 2] * 2, *unsent, *gradients]
    frozen = [software.frozen_bytes] * (share < 1 if request.work.trained else offload == "All")
    sizes = frozen + [share * each for each in trained] * bool(request.work.trained)
    return memory.pinned(request.model, sizes, gpus / request.replicas)


def _batch_seconds(setting: Setting, gpus: Indices) -> Numbers:
    """Return the seconds in which a pool without the generator fetches the batch: tokens, mask and log-probs."""
    nodes = np.ceil(gpus / setting.nodes.gpus_per_node)
    network = np.minimum(nodes * setting.nodes.network, setting.nodes.zone_bandwidth or np.inf)
    return BATCH_BYTES * setting.load.tokens / (network * setting.software.efficiency.network)
