"""Algorithm 2 of HybridFlow: the parallel sizes of one model on every number of GPUs at once, by simulation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_api.spec.job_spec import MICRO_BATCH_TOKENS, Offload
from rlhf_api.spec.parallel_sizes import Parallelism
from rlhf_mapper.architecture import CONTEXTS, Architecture
from rlhf_mapper.coefficients import Correction, Software
from rlhf_mapper.hardware import NodeGroup
from rlhf_mapper.kernels import Numbers
from rlhf_mapper.mapping import Phase
from rlhf_mapper.simulate import generation, memory, training
from rlhf_mapper.simulate.layouts import Layouts
from rlhf_mapper.simulate.passes import Passes
from rlhf_mapper.workload import Work, Workload

Indices = NDArray[np.int64]
ACTIVATION_SHARES = (0.05, 0.12, 0.2, 0.3, 0.45, 0.6, 0.75)
"""Shares of a GPU's memory that activations may fill beside states; coarse, so that sets of models share strategies."""
PIPELINES = (*range(1, 11), 12, 14, 16, 18, 20, 24, 28, 32)
ALL_SIZES_TO, SIZES_OF_AN_OCTAVE, MOST_STEPS = 16, 8, 160
"""Micro-batches to try: each size to the first number, then the second number in each doubling, at most the third."""


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """Request for the cut of a model: the model, its work in a step, and the user's sizes."""

    model: Architecture
    work: Work
    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    """Most tokens in one forward pass of the model; a single sequence may be longer."""
    sizes: Parallelism | None = None
    """Parallel sizes that the user has fixed; None: the mapper chooses all of them."""
    generation_pipeline: int | None = None
    generation_tensor: int | None = None
    generator_share: float | None = None
    """Share of a GPU's memory that the generator may take; None: all that states leave free."""
    offload: Offload = "None"
    """Model states that the user wants in host memory."""

    @property
    def replicas(self) -> int:
        """Copies of the model's weights: 1, or as many as the manifest sets."""
        return self.sizes.replicas if self.sizes else 1


@dataclass(frozen=True)
class Setting:
    """The machines, the programs and the workload for which a model is simulated."""

    nodes: NodeGroup
    software: Software
    load: Workload
    correction: Correction


class Way(NamedTuple):
    """Costs of a model, excluding its generation: arrays [ACTIVATION_SHARES, C cuts (p, t, c), K pool sizes]."""

    micro_batch: Numbers
    """Number of sequences in a forward pass; 0 if not even one fits."""
    recomputes: Numbers
    """1 where layers are recomputed in the backward pass, else 0."""
    expert: Numbers
    """Number of ranks that share the experts of a layer."""
    training_seconds: Numbers
    """Seconds of all updates in a step; inf where the model does not fit."""
    inference_seconds: Numbers
    """Seconds of all forward passes in a step; inf where the model does not fit."""

    @property
    def seconds(self) -> Numbers:
        return self.training_seconds + self.inference_seconds


def _fastest_so_far(seconds: Numbers) -> Indices:
    """Return for each size the index of the fastest among it and all smaller ones, the largest of equals: [G, ...]."""
    is_fastest = seconds <= np.minimum.accumulate(seconds, axis=0)
    places = np.arange(len(seconds)).reshape(-1, *(1,) * (seconds.ndim - 1))
    return np.maximum.accumulate(np.where(is_fastest, places, 0), axis=0)


def _at(table: NDArray[Any], place: Indices) -> NDArray[Any]:
    """Return table [G, C, K] at the index `place` [R, C, K] of each cut and pool size; -1 where that is -1."""
    found = np.take_along_axis(table, np.clip(place, 0, len(table) - 1), axis=0)
    return np.where(place < 0, -1, found)


def _faster(one: Way, other: Way) -> Way:
    """Return the costs of each cut in the faster of two ways, the first of equals."""
    is_faster = other.seconds < one.seconds
    return Way(*(np.where(is_faster, *pair) for pair in zip(other, one, strict=True)))


class Strategies:
    """Ways to cut one model over a pool, for all pool sizes at once: C cuts (p, t, c) by K pool sizes in GPUs."""

    def __init__(self, request: ModelRequest, setting: Setting, gpus: Indices, *, least: int = 1) -> None:
        """List the cuts to try and where they fit. gpus: pool sizes in GPUs, [K]; least: smallest p * t of a cut."""
        self.request, self.setting, self.gpus = request, setting, gpus
        self.passes = Passes(request.model, setting.nodes, setting.software)
        cuts = [cut for cut in self._cuts() if cut[0] * cut[1] >= least]
        self.cuts: Indices = np.array(cuts, dtype=np.int64).reshape(-1, 3)
        p, t, c = (self.cuts[:, column, None].astype(float) for column in (0, 1, 2))
        d = gpus[None, :] / (p * t * c)
        # Each data rank gets a sequence of each mini-batch, replicas divide d, and expert divides a copy's ranks.
        work, data = request.work, request.sizes and request.sizes.data
        rows = work.trained / work.updates if work.updates else np.inf
        even = (d <= min(rows, work.read or np.inf, setting.load.sequences)) & (d % request.replicas == 0)
        even &= d * t * c % (request.replicas * (request.sizes.expert if request.sizes else 1)) == 0
        self.fits: NDArray[np.bool_] = (d == np.floor(d)) & (d >= 1) & (even & (d == data) if data else even)
        self.layouts = Layouts(p, t, np.where(self.fits, d, 1.0), c)

    @property
    def is_empty(self) -> bool:
        """Whether the manifest and the machines allow no cut of the model."""
        return not len(self.cuts)

    def _cuts(self) -> list[tuple[int, int, int]]:
        """Return each (p, t, c) to try: p is at most the number of layers, t divides heads and feed-forward columns.

        If the manifest does not set the sizes, t also divides the GPUs of a node. Sequences are then cut only where one
        may be longer than a micro-batch.
        """
        request, fixed, slots = self.request, self.request.sizes, self.setting.nodes.gpus_per_node
        tensors = [t for t in range(1, slots + 1) if slots % t == 0] if request.model.may_be_cut else [1]
        pipelines = PIPELINES if request.model.may_be_cut else (1,)
        is_long = self.setting.load.most_tokens > request.micro_batch_tokens and request.model.may_be_cut
        return [
            (p, t, c)
            for p in ([fixed.pipeline] if fixed else pipelines)
            for t in ([fixed.tensor] if fixed else tensors)
            for c in ([fixed.context] if fixed else CONTEXTS if is_long else CONTEXTS[:1])
            if not request.model.cannot_be_cut(pipeline=p, tensor=t, generates=request.work.receives_weights)
        ]

    @cached_property
    def way(self) -> Way:
        """Costs of each cut. Unless the manifest decides, layers are recomputed if faster or needed to fit.

        The number of ranks that share the experts is chosen by speed as well (`_expert_sizes`).
        """
        work, given, found = self.request.work, self.request.work.recomputes, list[Way]()
        for expert in self._expert_sizes():
            layouts = replace(self.layouts, e=expert)
            read = self._seconds(training.inference_seconds, layouts, work, work.read_together, "scoring")
            reading = self.reading(layouts) if work.read or not work.trained else []
            for recomputes in (False, True) if given is None and work.trained else (bool(given),):
                found.append(self._way(layouts, read, reading, recomputes=recomputes))
        return reduce(_faster, found)

    def _expert_sizes(self) -> list[Numbers]:
        """Return the numbers of ranks to share the experts of a layer, by layout: [C cuts, K sizes] each.

        Unless the manifest decides, they are 1, the ranks of a stage in a node, and all ranks of a copy of the stage.
        The two latter are reduced to divisors of the number of experts.
        """
        model, fixed = self.request.model, self.request.sizes
        if fixed or model.experts == 1 or not model.may_be_cut:
            return [np.full(self.fits.shape, float(fixed.expert if fixed else 1))]
        copy = self.layouts.shards * self.layouts.t / self.request.replicas
        every = np.gcd(np.where(self.fits, copy, 1.0).astype(np.int64), model.experts)
        near = np.maximum(self.setting.nodes.gpus_per_node // self.cuts[:, :1], 1)
        return [each.astype(float) for each in (np.ones_like(every), np.gcd(every, near), every)]

    def _way(self, layouts: Layouts, read: Numbers, reading: list[memory.Moment], *, recomputes: bool) -> Way:
        """Return the costs of each cut with the fastest micro-batch that fits, and of equally fast ones the largest.

        read: seconds of the forward passes by micro-batch; reading: the moments at which their memory may be fullest.
        """
        work = replace(self.request.work, recomputes=recomputes)
        trained = self._seconds(training.training_seconds, layouts, work, work.trained_together, "update")
        seconds = trained + read
        whole = np.searchsorted(self._sizes, np.ceil(self._of_a_rank))  # all rows of a rank, without accumulation
        often, once = (
            self._largest(layouts, [*self.updating(layouts, recomputes=recomputes, accumulates=accumulates), *reading])
            for accumulates in (True, False)
        )
        best = _at(_fastest_so_far(seconds), np.minimum(often, whole))
        is_faster = (once >= whole) & ((best < 0) | (_at(seconds, whole + 0 * best) <= _at(seconds, best)))
        best = np.where(is_faster, whole, best)
        fits = best >= 0
        return Way(
            np.where(fits, self._sizes[np.maximum(best, 0)], 0).astype(float),
            np.full(best.shape, float(recomputes)),
            np.broadcast_to(np.asarray(layouts.e), best.shape),
            np.where(fits, _at(trained, best), np.inf),
            np.where(fits, _at(read, best), np.inf),
        )

    def reading(self, layouts: Layouts) -> list[memory.Moment]:
        """Return the moments of the model's forward passes at which memory may be fullest."""
        longest = self._longest(layouts, max(self.request.work.read, 1))
        return memory.reading(self.request.model, self.setting.software, self._of_a_copy(layouts), longest)

    def updating(self, layouts: Layouts, *, recomputes: bool, accumulates: bool) -> list[memory.Moment]:
        """Return the moments of the updates at which memory may be fullest; accumulates: over several micro-batches."""
        work = self.request.work
        if not work.trained:
            return []
        how = memory.Update(
            recomputes=recomputes,
            accumulates=accumulates,
            in_host=work.steps_in_host,
            trained_share=work.trained_share,
            gpu_memory=self.setting.nodes.gpu.memory,
        )
        longest, software = self._longest(layouts, work.trained / work.updates), self.setting.software
        return memory.updating(self.request.model, software, self._of_a_copy(layouts), longest, how)

    def _of_a_copy(self, layouts: Layouts) -> Layouts:
        """Return the layouts of the ranks that share one copy of the weights."""
        return replace(layouts, d=layouts.d / self.request.replicas)

    def _longest(self, layouts: Layouts, sequences: float) -> Numbers:
        """Return the most response tokens of a rank at once; sequences: of all data ranks together.

        They are no more than the request's limit, or than the rank's part of one sequence if that is more.
        """
        load, response = self.setting.load, self.setting.load.most_read_tokens
        at_once = np.maximum(float(self.request.micro_batch_tokens), np.minimum(load.most_tokens / layouts.c, response))
        longest: Numbers = np.minimum(at_once, np.ceil(sequences / layouts.d) * response)
        return longest

    @property
    def _of_a_rank(self) -> Numbers:
        """Sequences of a data rank in a mini-batch; of an untrained model in all forward passes: [C cuts, K sizes]."""
        work = self.request.work
        return (work.trained / work.updates if work.trained else max(work.read, 1)) / self.layouts.d

    @cached_property
    def _sizes(self) -> Indices:
        """Numbers of longest sequences in a micro-batch to try, ascending from 1: [G]."""
        tokens = self.request.micro_batch_tokens * int(np.max(self.cuts[:, 2], initial=1))
        most = max(int(tokens // self.setting.load.most_tokens), 1)
        more = (int(ALL_SIZES_TO * 2 ** (step / SIZES_OF_AN_OCTAVE)) for step in range(MOST_STEPS))
        sizes = np.array(sorted({*range(1, ALL_SIZES_TO + 1), *more}))
        return sizes[sizes <= most]

    def _largest(self, layouts: Layouts, moments: Sequence[memory.Moment]) -> Indices:
        """Return the index into `_sizes` of the largest micro-batch that fits at all moments; -1: none fits.

        A micro-batch has at most the request's tokens on each rank, or one sequence.

        Axes of the result: [ACTIVATION_SHARES, C cuts, K pool sizes].
        """
        rooms = np.array(ACTIVATION_SHARES)[:, None, None] * self.setting.nodes.gpu.memory
        limit = np.maximum(self.request.micro_batch_tokens * layouts.c, self.setting.load.most_tokens)
        most = np.minimum(memory.most_tokens(moments, rooms) * layouts.c, limit) / self.setting.load.most_tokens
        largest: Indices = np.searchsorted(self._sizes, most, side="right") - 1 + np.zeros(self.fits.shape, np.int64)
        return largest

    def _seconds(
        self, simulate: training.Simulator, layouts: Layouts, work: Work, together: int, phase: Phase
    ) -> Numbers:
        """Return the seconds by `simulate` with each micro-batch of `_sizes`: [G sizes, C cuts, K pool sizes]."""
        rows = self.rows(self._sizes, together)
        seconds = simulate(self.passes, work, self.setting.load, layouts, rows[:, None, None])
        seconds = seconds + 0 * rows[:, None, None]
        return np.where(self.fits, seconds, np.inf) * self.setting.correction.of(phase)

    def rows(self, sizes: NDArray[Any], together: int) -> Numbers:
        """Return the sequences in micro-batches with room for `sizes` longest ones; `together` share a prompt."""
        longest = self.setting.load.most_tokens
        budgets = np.maximum(sizes * longest, min(longest, self.request.micro_batch_tokens))
        return np.array(self.setting.load.rows_within(budgets.tolist(), together))

    @cached_property
    def best(self) -> Indices:
        """Index into `cuts` of the fastest cut in training and forward passes: [ACTIVATION_SHARES, K pool sizes]."""
        rows: Indices = np.argmin(self.way.seconds, axis=1)
        return rows

    def without_generator(self, room: Indices) -> Numbers:
        """Return [4, K pool sizes] seconds with the fastest cuts; room: [K] index into ACTIVATION_SHARES."""
        return self.stages(room, self.best[room, np.arange(len(self.gpus))])

    def stages(self, room: Indices, row: Indices) -> Numbers:
        """Return [4, K pool sizes] seconds as in `StateChoice`, with `cuts[row]` and ACTIVATION_SHARES[room]."""
        sizes = np.arange(len(self.gpus))
        read, trained = (each[room, row, sizes] for each in (self.way.inference_seconds, self.way.training_seconds))
        return np.stack([0 * sizes, read, trained, 0 * sizes])


class GeneratingStrategies(Strategies):
    """Strategies of a generating model: training layout, and generation layout dividing it (HybridFlow, appendix C)."""

    @cached_property
    def generators(self) -> Indices:
        """[G, 2] generation cuts (p_g, t_g) to try; each divides a training cut (p, t)."""
        request = self.request
        fixed = (request.generation_pipeline, request.generation_tensor)
        divides = {
            (p_g, t_g)
            for p, t in {(p, t) for p, t, _ in self.cuts.tolist()}
            for p_g in range(1, p + 1)
            if p % p_g == 0
            for t_g in range(1, t + 1)
            if t % t_g == request.model.vocabulary % t_g == 0
            and (p_g == 1 or request.model.layers % p == 0)  # vLLM's stages need equally many layers on GPUs
            and all(a in (None, b) for a, b in zip(fixed, (p_g, t_g), strict=True))
        }
        return np.array(sorted(divides), dtype=np.int64).reshape(-1, 2)

    @property
    def is_empty(self) -> bool:
        return not len(self.generators)

    @cached_property
    def generator_layouts(self) -> Layouts:
        """Layouts of generation (p_g, t_g, number of generators in the pool): [G generation cuts, K pool sizes]."""
        p, t = (self.generators[:, column, None].astype(float) for column in (0, 1))
        return Layouts(p, t, np.maximum(self.gpus[None, :] / (p * t), 1.0))

    @cached_property
    def of_training(self) -> tuple[Numbers, Indices, Numbers]:
        """Fastest training cut by generation cut: (seconds without generation, index into `cuts`, transition seconds).

        The first seconds contain the transition. Axes of all: [ACTIVATION_SHARES, G generation cuts, K pool sizes].
        """
        moved = np.full((len(self.generators), len(self.cuts), len(self.gpus)), np.inf)
        for row, (p_g, t_g) in enumerate(self.generators.tolist()):
            divided = (self.cuts[:, 0] % p_g == 0) & (self.cuts[:, 1] % t_g == 0)
            divided &= (self.request.model.layers % self.cuts[:, 0] == 0) | (p_g == 1)
            one = Layouts(np.array(float(p_g)), np.array(float(t_g)), np.array(1.0))
            seconds = generation.transition_seconds(self.passes, self.request.work, self.layouts, one)
            moved[row] = np.where(divided[:, None], seconds, np.inf) * np.ones_like(self.gpus)
        moved *= self.setting.correction.of("reshard")
        whole = self.way.seconds[:, None] + moved[None]
        row = np.argmin(whole, axis=2)
        moved_best = np.take_along_axis(np.broadcast_to(moved, whole.shape), row[:, :, None], axis=2)[:, :, 0]
        return np.take_along_axis(whole, row[:, :, None], axis=2)[:, :, 0], row, moved_best

    def cache(self, held: Numbers) -> Numbers:
        """Return a GPU's bytes for the KV cache: [G generation cuts, K pool sizes]; negative: the weights do not fit.

        held: bytes of a GPU for the states, by pool size.
        """
        q = self.setting.nodes.gpu.memory
        usable = memory.usable(self.setting.software, q, self.gpus, generates=True)
        room = np.minimum(usable - held, (self.request.generator_share or 1.0) * q)
        left = room - self.generator_bytes
        sent = generation.sent_to_gpu(self.passes, self.generator_layouts)
        resharding = memory.reshard_bytes(self.setting.software, sent)  # before there is a cache
        return np.where(left >= resharding, left, -1.0)

    @cached_property
    def generator_bytes(self) -> Numbers:
        """Bytes of a GPU for the generator's copy of the weights, by generation cut (p_g, t_g): [G, 1]."""
        return generation.weights_of_gpu(self.passes, self.generator_layouts)

    def generation_seconds(self, cache: Numbers) -> Numbers:
        """Return [G generation cuts, K pool sizes] seconds of generation; cache: bytes of a GPU; inf: nothing fits."""
        key = cache.tobytes()
        if key not in self._generated:
            load, work = self.setting.load, self.request.work
            seconds = generation.generation_seconds(self.passes, work, load, self.generator_layouts, cache)
            self._generated[key] = seconds * self.setting.correction.of("generation")
        return self._generated[key]

    @cached_property
    def _generated(self) -> dict[bytes, Numbers]:
        return {}

    def with_generator(self, room: Indices, cache: Numbers) -> tuple[Indices, Numbers]:
        """Return (index into `generators` of the fastest cut by pool size, its seconds [4, K pool sizes]).

        room: index into ACTIVATION_SHARES by pool size; cache: KV bytes of a GPU by generation cut and pool size.
        """
        sizes = np.arange(len(self.gpus))
        least, row, moved = (table[room, :, sizes].T for table in self.of_training)
        generated = self.generation_seconds(cache)
        best = np.argmin(least + generated, axis=0)
        stages = self.stages(room, row[best, sizes])
        stages[0], stages[3] = generated[best, sizes], moved[best, sizes]
        return best, stages
