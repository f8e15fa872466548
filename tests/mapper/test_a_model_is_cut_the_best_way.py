"""Algorithm 2 against trying every p-t-d by direct calls of the simulators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import ceil, gcd
from typing import Any

import numpy as np
import pytest

from rlhf_api.spec.parallel_sizes import Parallelism
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import TRAINER, Correction, Software
from rlhf_mapper.hardware import GPUS, NodeGroup
from rlhf_mapper.kernels import Numbers
from rlhf_mapper.pools import PoolCosts, pool_sizes
from rlhf_mapper.search.pruned import pruned
from rlhf_mapper.simulate import generation, memory, training
from rlhf_mapper.simulate.layouts import Layouts
from rlhf_mapper.simulate.passes import Passes
from rlhf_mapper.strategy import ACTIVATION_SHARES, PIPELINES, GeneratingStrategies, ModelRequest, Setting, Strategies
from rlhf_mapper.workload import Lengths, Work, Workload
from tests.each import each_case
from tests.mapper.oracles import testbed

SMALL = Architecture(layers=6, hidden=1024, heads=12, kv_heads=4, head_size=128, ffn=4096, vocabulary=32000)
MODELS = {
    "small with GQA": SMALL,
    "few heads": replace(SMALL, heads=3, kv_heads=3),
    "odd MLP": replace(SMALL, ffn=4098),
    "one layer": replace(SMALL, layers=1),
    "7B": testbed.MODELS["7B"],
    "34B": testbed.MODELS["34B"],
    "mixture": replace(SMALL, ffn=768, experts=32, experts_per_token=4),
}
NODES = {
    "8 A100": NodeGroup(gpu=GPUS["a100-80g"], count=4, gpus_per_node=8),
    "6 L40S": NodeGroup(gpu=GPUS["l40s-48g"], count=3, gpus_per_node=6),
    "4 A10, slow network": NodeGroup(gpu=GPUS["a10-24g"], count=3, gpus_per_node=4, node_bandwidth=1e9),
}
WORK = {
    "trains": Work(read=64, trained=64, updates=4),
    "recomputes": Work(read=64, trained=128, updates=8, recomputes=True),
    "reads": Work(read=48),
    "few": Work(read=12, trained=12, updates=2),
}
Cut = tuple[int, ...]
"""p, t, d, context and expert."""


def setting_of(nodes: NodeGroup, software: Software = TRAINER, *, response: float = 512.0) -> Setting:
    load = Workload(sequences=64, prompt=Lengths((512.0,)), response=Lengths((response,)), work={})
    return Setting(nodes, software, load, Correction())


def layout(cut: Cut) -> Layouts:
    return Layouts(*(np.array(float(size)) for size in cut))


def every_cut(wanted: ModelRequest, setting: Setting, gpus: int) -> Iterator[Cut]:
    """t divides heads, KV heads, MLP and node; p leaves no stage empty; every data rank has a sequence.

    Ranks share the tokens of rows longer than a micro-batch. Experts are whole, or shared in a node or a whole copy.
    """
    model, work = wanted.model, wanted.work
    whole = (model.heads, model.kv_heads, model.ffn, setting.nodes.gpus_per_node)
    few = min(work.trained / work.updates if work.updates else work.read, work.read, setting.load.sequences)
    for t in range(1, setting.nodes.gpus_per_node + 1):
        for p in (p for p in PIPELINES if p <= model.layers):
            for c in (1, 2, 4, 8) if setting.load.most_tokens > wanted.micro_batch_tokens else (1,):
                d, rest = divmod(gpus, p * t * c)
                every, near = gcd(d * c * t, model.experts), max(setting.nodes.gpus_per_node // p, 1)
                if not rest and 1 <= d <= few and all(size % t == 0 for size in whole):
                    yield from ((p, t, d, c, e) for e in {1, gcd(every, near), every})


def shares_held(wanted: ModelRequest, setting: Setting, cut: Cut) -> list[float]:
    """Of a GPU's memory, with micro-batches of 1, 2, .. sequences, at the fullest moment of updates and forward passes.

    As many as a micro-batch may have.
    """
    work, gpu, row = wanted.work, setting.nodes.gpu.memory, setting.load.most_tokens / cut[3]
    longest = max(wanted.micro_batch_tokens, row)
    share = (work.trained / work.updates if work.trained else work.read) / cut[2]
    most = min(int(longest // row), ceil(share))
    given, response = (wanted.model, setting.software, layout(cut)), setting.load.most_read_tokens
    read, trained = (
        min(max(wanted.micro_batch_tokens, min(row, response)), ceil(rows / cut[2]) * response)
        for rows in (work.read, work.trained / max(work.updates, 1))
    )
    tokens: Numbers = row * np.arange(1, most + 1, dtype=np.float64)
    held = memory.fullest(memory.reading(*given, read), tokens)
    if work.trained:
        once, often = (
            memory.Update(recomputes=bool(work.recomputes), accumulates=each, gpu_memory=gpu) for each in (False, True)
        )
        updates = [memory.fullest(memory.updating(*given, trained, how), tokens) for how in (once, often)]
        held = np.maximum(held, np.where(tokens < row * ceil(share), updates[1], updates[0]))
    shares: list[float] = (held / gpu).tolist()
    return shares


def seconds_of(wanted: ModelRequest, setting: Setting, cut: Cut, rooms: Sequence[float]) -> list[float]:
    """Of training and forward passes in each room; inf where not one sequence fits."""
    passes = Passes(wanted.model, setting.nodes, setting.software)
    held = shares_held(wanted, setting, cut)

    @cache
    def taken(size: int) -> float:
        parts = [
            simulate(passes, wanted.work, setting.load, layout(cut), np.array(float(size)))
            for simulate in (training.training_seconds, training.inference_seconds)
        ]
        return float(sum(parts))

    fitting = ([place + 1 for place, each in enumerate(held) if each <= room] for room in rooms)
    return [min(map(taken, sizes), default=float("inf")) for sizes in fitting]


CASES = [
    pytest.param(model, nodes, work, marks=pytest.mark.slow if (a + b + c) % len(NODES) else ())
    for (a, model), (b, nodes), (c, work) in product(enumerate(MODELS), enumerate(NODES), enumerate(WORK))
]
"""A third is fast: those in which each two of a model, nodes and work occur once at least."""


@pytest.mark.parametrize(("model", "nodes", "work"), CASES)
def test_no_other_cut_is_faster(model: str, nodes: str, work: str) -> None:
    check_cuts(ModelRequest(model=MODELS[model], work=WORK[work]), setting_of(NODES[nodes]))


@pytest.mark.parametrize("model", ["7B", "mixture"])
def test_no_other_cut_of_long_rows_is_faster(model: str) -> None:
    wanted = ModelRequest(model=MODELS[model], work=WORK["recomputes"])
    check_cuts(wanted, setting_of(NODES["8 A100"], response=32256.0))


def check_cuts(wanted: ModelRequest, setting: Setting) -> None:
    """Each pool size and room has the fastest of all cuts."""
    gpus = pool_sizes(setting.nodes)
    strategies = Strategies(wanted, setting, gpus)
    rooms = range(len(ACTIVATION_SHARES))
    found = [strategies.without_generator(np.full(len(gpus), room)).sum(axis=0) for room in rooms]
    for size, count in enumerate(gpus.tolist()):
        cuts = {cut: seconds_of(wanted, setting, cut, ACTIVATION_SHARES) for cut in every_cut(wanted, setting, count)}
        for room in rooms:
            least = min((seconds[room] for seconds in cuts.values()), default=float("inf"))
            assert found[room][size] == pytest.approx(least), (count, room)
            if np.isfinite(least):
                row = strategies.best[room, size]
                p, t, c = strategies.cuts[row].tolist()
                e = int(strategies.way.expert[room, row, size])
                assert cuts[p, t, count // (p * t * c), c, e][room] == pytest.approx(least)


@each_case("software", [TRAINER, testbed.SOFTWARE], ids=["shards weights", "whole replicas"])
@pytest.mark.parametrize("nodes", [pytest.param(each, marks=[pytest.mark.slow] * (each != "8 A100")) for each in NODES])
@each_case("model", ["small with GQA", "7B"])
def test_no_other_generation_layout_is_faster(model: str, nodes: str, software: Software) -> None:
    work = Work(generated=64, passes=1, read=64, trained=64, updates=4)
    wanted, setting = ModelRequest(model=MODELS[model], work=work), setting_of(NODES[nodes], software)
    gpus, passes = pool_sizes(setting.nodes), Passes(MODELS[model], setting.nodes, software)
    strategies = GeneratingStrategies(wanted, setting, gpus)
    cache = np.broadcast_to(
        0.5 * setting.nodes.gpu.memory - strategies.generator_bytes, (len(strategies.generators), 1)
    )
    cache = cache * np.ones(len(gpus))
    best, stages = strategies.with_generator(np.full(len(gpus), 3), cache)
    for size, count in enumerate(gpus.tolist()):
        tried = {}
        for cut in every_cut(wanted, setting, count):
            (trains,) = seconds_of(wanted, setting, cut, ACTIVATION_SHARES[3:4])
            for p_g, t_g in ((p, t) for p in range(1, cut[0] + 1) for t in range(1, cut[1] + 1)):
                if cut[0] % p_g or cut[1] % t_g or wanted.model.vocabulary % t_g:
                    continue
                if p_g > 1 and wanted.model.layers % cut[0]:
                    continue
                generator = layout((p_g, t_g, count // (p_g * t_g)))
                free = 0.5 * setting.nodes.gpu.memory - generation.weights_of_gpu(passes, generator)
                made = generation.generation_seconds(passes, work, setting.load, generator, free)
                moved = generation.transition_seconds(passes, work, layout(cut), generator)
                tried[p_g, t_g, cut] = trains + float(made + moved)
        least = min(tried.values(), default=float("inf"))
        assert stages[:, size].sum() == pytest.approx(least)
        if np.isfinite(least):
            p_g, t_g = strategies.generators[best[size]].tolist()
            p, t, _ = strategies.cuts[strategies.of_training[1][3, best[size], size]].tolist()
            assert tried[p_g, t_g, (p, t, count // (p * t), 1, 1)] == pytest.approx(least)


def test_a_larger_cache_need_raises_the_generation_shards() -> None:
    work = Work(generated=1024, passes=1, read=64, trained=64, updates=4)
    wanted, setting = ModelRequest(model=testbed.MODELS["34B"], work=work), setting_of(NODES["8 A100"])
    strategies = GeneratingStrategies(wanted, setting, np.array([32]))
    fits = []
    for share in (0.95, 0.5, 0.25, 0.12):
        cache = share * 80e9 - strategies.generator_bytes
        found = np.isfinite(strategies.generation_seconds(cache))[:, 0]
        fits.append({tuple(cut) for cut, fit in zip(strategies.generators.tolist(), found, strict=True) if fit})
    shards = [min(p * t for p, t in each) for each in fits]
    assert shards[0] == 1
    assert shards == sorted(set(shards)), "each time the weights leave less"


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 8.0), (3, 24.0), (10_000, 8192.0)])
def test_the_head_has_room_for_responses_alone(sequences: int, tokens: float) -> None:
    wide = replace(SMALL, layers=1, vocabulary=151936)
    wanted = ModelRequest(model=wide, work=Work(read=sequences, trained=2 * sequences, updates=2))
    strategies = Strategies(wanted, setting_of(NODES["8 A100"], response=8.0), np.array([1]))
    cut, gpu = layout((1, 1, 1, 1, 1)), strategies.setting.nodes.gpu.memory
    how = memory.Update(recomputes=False, accumulates=False, gpu_memory=gpu)
    given = (wide, strategies.setting.software, cut, tokens)
    found = strategies.reading(cut), strategies.updating(cut, recomputes=False, accumulates=False)
    for mine, theirs in zip(found, (memory.reading(*given), memory.updating(*given, how)), strict=True):
        assert memory.fullest(mine, 1000.0) == memory.fullest(theirs, 1000.0)


TWO_BY_FOUR = Parallelism(pipeline=2, tensor=4)
PINNED: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline": 3},
    "tensor": {"tensor": 2},
    "data": {"data": 4},
    "all": {"pipeline": 2, "tensor": 2, "data": 4},
    "context": {"context": 2, "data": 4},
}


@each_case("case", PINNED)
def test_sizes_that_the_user_asks_for_are_kept(case: str) -> None:
    wanted = ModelRequest(model=SMALL, work=WORK["trains"], sizes=Parallelism(**PINNED[case]))
    gpus = np.array([1, 2, 4, 6, 8, 16, 24, 32])
    strategies = Strategies(wanted, setting_of(NODES["8 A100"]), gpus)
    seconds = strategies.without_generator(np.full(len(gpus), 5)).sum(axis=0)
    assert np.isfinite(seconds).any()
    for size in np.nonzero(np.isfinite(seconds))[0]:
        p, t, c = strategies.cuts[strategies.best[5, size]].tolist()
        chosen = {"pipeline": p, "tensor": t, "context": c, "replicas": 1, "data": int(gpus[size]) // (p * t * c)}
        assert chosen == {**chosen, **PINNED[case]}
    if case == "all":
        assert gpus[np.isfinite(seconds)].tolist() == [16]


def test_replicas_divide_the_data_ranks_and_take_their_memory() -> None:
    gpus = np.array([1, 2, 4, 6, 8])
    wanted = ModelRequest(model=SMALL, work=WORK["trains"], sizes=Parallelism(replicas=4))
    strategies = Strategies(wanted, setting_of(NODES["8 A100"]), gpus)
    assert gpus[np.isfinite(strategies.without_generator(np.full(5, 5)).sum(axis=0))].tolist() == [4, 8]


def test_parts_of_experts_divide_a_copy_of_the_weights() -> None:
    gpus = np.array([4, 8, 16])
    wanted = ModelRequest(model=MODELS["mixture"], work=WORK["trains"], sizes=Parallelism(tensor=2, expert=8))
    strategies = Strategies(wanted, setting_of(NODES["8 A100"]), gpus)
    assert gpus[np.isfinite(strategies.without_generator(np.full(3, 5)).sum(axis=0))].tolist() == [8, 16]
    assert (strategies.way.expert == 8).all()


def test_a_generation_layout_that_is_asked_for_is_kept() -> None:
    work = Work(generated=64, passes=1, read=64, trained=64, updates=4)
    wanted = ModelRequest(model=SMALL, work=work, sizes=TWO_BY_FOUR, generation_tensor=2, generation_pipeline=1)
    strategies = GeneratingStrategies(wanted, setting_of(NODES["8 A100"]), np.array([8, 16]))
    assert strategies.generators.tolist() == [[1, 2]]


def test_measurements_correct_each_kind_by_its_factor() -> None:
    work = Work(generated=64, passes=1, read=64, trained=64, updates=4)
    sizes: dict[str, Any] = {
        "sizes": TWO_BY_FOUR,
        "generation_tensor": 2,
        "generation_pipeline": 1,
        "micro_batch_tokens": 1024,
    }
    wanted = ModelRequest(model=SMALL, work=work, **sizes)
    plain = setting_of(NODES["8 A100"])
    factors = Correction({"update": 2.0, "scoring": 3.0, "generation": 5.0, "reshard": 7.0})
    cache, room = np.array([[20e9]]), np.array([5])
    before, after = (
        GeneratingStrategies(wanted, setting, np.array([8])) for setting in (plain, replace(plain, correction=factors))
    )
    for name, factor in (("training_seconds", 2), ("inference_seconds", 3)):
        assert getattr(after.way, name)[5] == pytest.approx(factor * getattr(before.way, name)[5])
    assert after.generation_seconds(cache) == pytest.approx(5 * before.generation_seconds(cache))
    moved, corrected = (strategies.of_training[2][5, 0, 0] for strategies in (before, after))
    assert corrected == pytest.approx(7 * moved)
    generated, _, _, transition = after.with_generator(room, cache)[1]
    assert generated == pytest.approx(5 * before.generation_seconds(cache)[0])
    assert transition == pytest.approx(7 * moved)


def test_a_model_is_simulated_once_for_all_sets_and_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, list[tuple[Architecture, bool]]] = {"training_seconds": [], "inference_seconds": []}

    def counting(name: str) -> training.Simulator:
        simulate: training.Simulator = getattr(training, name)

        def counted(passes: Passes, work: Work, load: Workload, layouts: Layouts, micro_batch: Numbers) -> Numbers:
            calls[name].append((passes.model, work.steps_in_host))
            return simulate(passes, work, load, layouts, micro_batch)

        return counted

    for name in calls:
        monkeypatch.setattr(training, name, counting(name))
    work, setting = testbed.work_of("PPO", 64, 4), setting_of(NODES["8 A100"])
    wanted = {
        role: ModelRequest(model=replace(SMALL, layers=4 + place), work=each)
        for place, (role, each) in enumerate(work.items())
    }
    costs = PoolCosts(wanted, [setting], [pool_sizes(setting.nodes)])
    assert pruned(costs, list(wanted))
    for name, models in calls.items():
        assert len(models) == len(set(models)) == len(wanted) + sum(each.trained > 0 for each in work.values()), name
