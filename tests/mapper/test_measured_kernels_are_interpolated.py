"""Tables of measured kernels: what they give at and between their points, and what is made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from itertools import pairwise

import numpy as np
import pytest

from rlhf_api.spec.rollout import Rollout
from rlhf_mapper import kernels
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import software_for
from rlhf_mapper.hardware import GPUS, NodeGroup
from rlhf_mapper.prediction import differ, error_kind
from rlhf_mapper.simulate import generation, layer, training
from rlhf_mapper.simulate.layouts import Layouts
from rlhf_mapper.simulate.passes import Passes
from rlhf_mapper.workload import Lengths, Work, Workload, lognormal
from tests.each import each_case

H100 = GPUS["h100-80g"]
MODEL = Architecture(layers=32, hidden=4096, heads=32, kv_heads=8, head_size=128, ffn=14336, vocabulary=128256)
NODES = NodeGroup(gpu=H100, count=4, gpus_per_node=8)
MOST_BYTES = 300_000


def layout(p: int = 1, t: int = 1, d: int = 1) -> Layouts:
    return Layouts(*(np.array(float(size)) for size in (p, t, d)))


def load_of(*responses: float) -> Workload:
    return Workload(sequences=64, prompt=Lengths((100.0,)), response=Lengths(responses), work={})


@each_case("kind", ["custom", "all_reduce", "all_gather", "reduce_scatter"])
def test_a_link_of_any_speed_has_collectives(kind: kernels.Collective) -> None:
    for link in (0.1e9, 1e9, 2e9, 6e9, 30e9, 2e12):  # a slice of a GPU has 1.9 GB/s
        assert np.isfinite(kernels.collective_seconds(link, kind).logs).all()


def test_a_table_gives_its_points_and_between_them_its_slope() -> None:
    table = kernels.Table(np.log2(np.array([[1.0, 4.0], [2.0, 16.0]])), (0, 3))
    assert table.at(np.array([1.0, 2.0]), np.array([8.0, 16.0])).tolist() == pytest.approx([1, 16])
    assert table.at(1.0, np.sqrt(8 * 16)) == pytest.approx(2), "half of the way in logarithms"
    assert table.at(np.sqrt(2), np.sqrt(8 * 16)) == pytest.approx((1 * 4 * 2 * 16) ** 0.25)
    assert table.at(100.0, 1.0) == pytest.approx(2), "sizes beyond the grid count as its edge"


def test_the_tables_are_small_and_name_their_source() -> None:
    text = resources.files("rlhf_mapper").joinpath("kernels.json").read_text()
    document = json.loads(text)
    assert len(text) <= MOST_BYTES
    assert "aiconfigurator 0.8" in document["source"]
    assert document["license"].startswith("Apache-2.0")
    assert {"a100-80g", "h100-80g", "h200-141g", "b200-180g", "gb200-186g", "l40s-48g"} == set(document["systems"])


def test_a_gpu_without_measurements_takes_the_most_similar_one() -> None:
    found = {name: kernels.nearest(GPUS[name]).gpu.name for name in ("h100-80g", "a100-40g", "l4-24g", "h200-nvl-141g")}
    assert found == {
        "h100-80g": "h100-80g",
        "a100-40g": "a100-80g",
        "l4-24g": "l40s-48g",
        "h200-nvl-141g": "h200-141g",
    }
    fast, slow = (
        float(kernels.product_seconds(replace(H100, bf16=peak), *map(np.array, (8192.0, 4096.0, 4096.0))))
        for peak in (H100.bf16, 0.8 * H100.bf16)
    )
    assert slow / fast == pytest.approx(1 / 0.8)


@pytest.mark.parametrize(("ranks", "bytes_", "seconds"), [(8, 16384, 5.2e-6), (2, 2**21, 12.5e-6), (8, 2**21, 21e-6)])
def test_an_all_reduce_takes_what_vllm_measured(ranks: int, bytes_: int, seconds: float) -> None:
    table = kernels.collective_seconds(450e9, "custom")
    assert float(table.at(float(ranks), float(bytes_))) == pytest.approx(seconds, rel=0.02)


def test_a_link_beyond_the_measured_stretches_long_messages() -> None:
    fast, slow = (kernels.collective_seconds(link, "all_gather") for link in (32e9, 16e9))
    assert slow.at(8.0, 256.0) == pytest.approx(fast.at(8.0, 256.0))
    assert slow.at(8.0, 2.0**30) == pytest.approx(fast.at(8.0, 2.0**30) * 32 / 16, rel=0.01)


@pytest.mark.parametrize("kind", ["custom", "all_reduce", "alltoall"])
def test_a_link_between_measured_ones_is_between_them(kind: kernels.Collective) -> None:
    slow, between, fast = (kernels.collective_seconds(link, kind).logs for link in (300e9, 380e9, 450e9))
    assert (np.minimum(slow, fast) <= between + 1e-9).all()
    assert (between <= np.maximum(slow, fast) + 1e-9).all()
    nearly = kernels.collective_seconds(299.99e9, kind).logs
    np.testing.assert_allclose(nearly, slow, atol=1e-3)


def test_more_rows_of_a_product_never_take_less_than_half() -> None:
    rows = np.exp2(np.arange(16.0))
    seconds = kernels.product_seconds(H100, rows, np.array(6144.0), np.array(4096.0))
    assert all(later > 0.8 * earlier for earlier, later in pairwise(seconds.tolist()))


def test_passes_of_generated_rows_take_longer() -> None:
    passes = Passes(MODEL, NODES, software_for("GPU", "BF16"))
    work, given = Work(trained=64, updates=1), load_of(500.0)
    generated = replace(given, work={"actor": Work(generated=64)})
    alone, beside = (
        float(training.training_seconds(passes, work, load, layout(d=8), np.array(8.0))) for load in (given, generated)
    )
    assert 1.5 * alone < beside < 2.1 * alone


def test_all_replicas_wait_for_the_longest_response() -> None:
    passes = Passes(MODEL, NODES, software_for("GPU", "BF16"))
    load = load_of(*lognormal(300, 2000, most=4000))
    one, many = (
        float(generation.generation_seconds(passes, Work(generated=8 * d, passes=1), load, layout(d=d), np.array(5e10)))
        for d in (1, 32)
    )
    assert many > 1.2 * one, "each replica has eight responses in both"


def test_measured_decode_steps_take_bytes_off() -> None:
    plain, weights, both = (
        Passes(MODEL, NODES, software_for("GPU", "BF16", rollout=each))
        for each in (Rollout(), Rollout(quantization="Int8"), Rollout(quantization="FP8", kv_cache="FP8"))
    )
    for at_once in (1.0, 64.0):
        steps = [
            float(generation.decode_step(each, layout(), np.array(at_once), 4000)) for each in (plain, weights, both)
        ]
        assert 0.4 * steps[0] < steps[2] < steps[1] < steps[0]


def test_fused_layers_keep_and_move_less() -> None:
    plain, fused = (software_for("GPU", "BF16", kernels=kind) for kind in ("Plain", "Fused"))
    one = Layouts(np.array(1.0), np.array(1.0), np.array(1.0))
    assert layer.kept(MODEL, fused).on(MODEL, one) < layer.kept(MODEL, plain).on(MODEL, one)
    assert layer.moved(MODEL, fused).on(MODEL, one) < 0.5 * layer.moved(MODEL, plain).on(MODEL, one)
    assert layer.kernels(MODEL, fused) < 0.5 * layer.kernels(MODEL, plain)
    assert software_for("GPU", "BF16", kernels="Auto") == fused
    assert software_for("GPU", "FP32", kernels="Fused").layers == "Plain", "fused kernels are those of 16 bits here"
    assert software_for("CPU", "Auto", kernels="Auto").layers == "Plain"


def test_an_interval_is_that_of_the_kind_of_job() -> None:
    software = software_for("GPU", "BF16")
    generates = replace(load_of(100.0), work={"actor": Work(generated=8)})
    kinds = {
        error_kind([MODEL], generates): (MODEL, generates),
        error_kind([MODEL], replace(generates, works_ahead=True)): None,
        error_kind([replace(MODEL, experts=8, experts_per_token=2)], generates): None,
        error_kind([MODEL], load_of(100.0)): None,
    }
    assert list(kinds) == ["Sync", "Async", "Experts", "Training"]
    assert all(software.errors[kind][0] < 1 < software.errors[kind][1] for kind in kinds)


def test_plans_within_the_error_do_not_differ() -> None:
    assert not differ(100.0, 109.0)
    assert not differ(109.0, 100.0)
    assert differ(100.0, 111.0)
