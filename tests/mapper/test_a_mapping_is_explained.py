"""What `rlhf plan` says of a mapping: the JSON, the text and the timeline."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import cast

import pytest
from rich.console import Console

from rlhf_mapper.architecture import Architecture
from rlhf_mapper.auto_map import auto_map
from rlhf_mapper.mapping import STAGE_OF, STAGES, Device, DeviceMapping, Infeasible, Prediction, as_json
from rlhf_planning.mapping_text import TIMES, explain
from rlhf_planning.timeline import Timeline, marks_of, seconds_text, timeline_of
from tests.each import each_case
from tests.mapper.example_mappings import COLOCATED, LAPTOP, SPLIT, TOO_BIG, UNKNOWN
from tests.mapper.planned_jobs import cluster_of, job_of, shapes_of

MAPPINGS = {"colocated": COLOCATED, "split": SPLIT, "laptop": LAPTOP}
ANSWERS = {**MAPPINGS, "unknown": UNKNOWN, "too big": TOO_BIG}
TINY = Architecture(layers=4, hidden=128, heads=4, kv_heads=2, head_size=32, ffn=320, vocabulary=512)
KEYS = {"schema_version", "predicted", "pools", "models", "rejected", "infeasible"}


def predicted(mapping: DeviceMapping) -> Prediction:
    assert mapping.prediction
    return mapping.prediction


def timeline(mapping: DeviceMapping) -> Timeline:
    return timeline_of(mapping.pools, predicted(mapping))


def text_of(mapping: DeviceMapping | Infeasible, columns: int) -> str:
    """What a pipe gets."""
    console = Console(width=columns, file=io.StringIO())
    explain(mapping, title="a [job] of PPO", console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


each_mapping = pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
each_answer = pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)


@each_mapping
def test_the_bars_of_the_slowest_pool_fill_a_stage(mapping: DeviceMapping) -> None:
    drawn, begin = timeline(mapping), 0.0
    for stage in STAGES:
        start, end = drawn.stages[stage]
        bars = [bar for bar in drawn.bars if STAGE_OF[bar.phase] == stage]
        busy = [sum(bar.end - bar.start for bar in bars if bar.pool == pool.name) for pool in mapping.pools]
        assert start == pytest.approx(begin)
        assert max(busy) == pytest.approx(end - start) == pytest.approx(predicted(mapping).stages[stage])
        assert all(start <= bar.start < bar.end <= end * (1 + 1e-9) for bar in bars)
        begin = end
    assert drawn.seconds == pytest.approx(predicted(mapping).step_seconds)


@each_mapping
def test_models_of_a_pool_take_turns_and_every_phase_has_a_bar(mapping: DeviceMapping) -> None:
    drawn = timeline(mapping)
    for pool in mapping.pools:
        bars = sorted((bar.start, bar.end) for bar in drawn.bars if bar.pool == pool.name)
        assert all(left[1] <= right[0] * (1 + 1e-9) for left, right in pairwise(bars))
    seconds = {(bar.model, bar.phase): bar.end - bar.start for bar in drawn.bars}
    wanted = {
        (role, phase): s for role, model in predicted(mapping).models.items() for phase, s in model.seconds.items()
    }
    assert seconds == pytest.approx(wanted)


def test_a_pool_waits_for_slower_ones() -> None:
    drawn = timeline(SPLIT)
    assert drawn.idle("reference") == [pytest.approx((0, 59.6)), pytest.approx((71.9, 193.9))]
    assert drawn.busy("reference") == pytest.approx(12.3 / 193.9)
    assert timeline(COLOCATED).idle("all") == []


def test_generation_ahead_overlaps_the_rest_of_the_step() -> None:
    ahead = replace(SPLIT, prediction=replace(predicted(SPLIT), works_ahead=True))
    drawn = timeline(ahead)
    of_generation = [bar for bar in drawn.bars if STAGE_OF[bar.phase] == "generation"]
    assert [(bar.start, bar.end) for bar in of_generation] == [pytest.approx((0, 1.2)), pytest.approx((1.2, 59.6))]
    assert drawn.stages["preparation"][0] == pytest.approx(1.2), "the actor's ranks send weights before"
    assert drawn.seconds == pytest.approx(193.9 - 59.6 + 1.2)
    assert drawn.ahead == "; generation is of a later step"
    assert drawn.ahead in text_of(ahead, 120)
    assert not timeline(SPLIT).ahead


@each_case(
    ("seconds", "most", "labels"),
    [
        (91.3, 6, ["0 s", "20 s", "40 s", "60 s", "80 s"]),
        (0.593, 4, ["0 ms", "200 ms", "400 ms"]),
        (1.0, 3, ["0 s", "0.5 s", "1 s"]),
        (12_000.0, 4, ["0 s", "5,000 s", "10,000 s"]),
    ],
)
def test_a_time_axis_has_round_marks(seconds: float, most: int, labels: list[str]) -> None:
    assert [label for _, label in marks_of(seconds, most=most)] == labels


def test_a_time_has_a_minus_that_every_terminal_has() -> None:
    assert seconds_text(1e-9) == "1e-06 ms"


def test_models_that_recompute_their_layers_are_named() -> None:
    prediction = predicted(COLOCATED)
    models = {role: replace(model, recomputes=role == "critic") for role, model in prediction.models.items()}
    again = replace(COLOCATED, prediction=replace(prediction, models=models))
    assert "recomputed in the backward pass (gradientCheckpointing): critic\n" in text_of(again, 120)
    assert "recomputed" not in text_of(COLOCATED, 120)


@each_answer
def test_the_json_has_the_keys_of_the_contract(answer: DeviceMapping | Infeasible) -> None:
    document = as_json(answer)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document.keys() == KEYS
    assert document["schema_version"] == 1


def test_the_json_of_a_mapping() -> None:
    document = as_json(SPLIT)
    assert document["predicted"].keys() >= {"step_seconds", "tokens_per_second", "phases"}
    assert (
        document["pools"][3].items()
        >= {
            "name": "reward-and-cost",
            "models": ["reward", "cost"],
            "gpu": "a100-80g",
            "gpus": 16,
            "nodes": 3,
        }.items()
    )
    actor, critic = document["models"]["actor"], document["models"]["critic"]
    assert [actor[key] for key in ("p", "t", "d", "p_g", "t_g", "d_g")] == [4, 8, 2, 1, 4, 8]
    assert not {"p_g", "t_g", "d_g"} & critic.keys()
    assert critic["micro_batch"] == 8
    assert critic["memory"]["training"]["optimizer"] == pytest.approx(18.6e9)
    assert set(document["models"]) == set(SPLIT.sizes)
    assert document["rejected"][0]["predicted"] == {"step_seconds": 195.2}
    assert document["rejected"][0]["pools"][0] == {"models": ["actor", "reference"], "gpu": "h100-80g", "gpus": 64}
    assert document["infeasible"] is None


def test_the_json_where_nothing_is_predicted_or_nothing_fits() -> None:
    unknown, infeasible = as_json(UNKNOWN), as_json(TOO_BIG)
    assert (unknown["predicted"], unknown["models"]) == (None, {})
    assert unknown["pools"][0]["gpus"] == 2
    assert infeasible["infeasible"]["short_bytes"] == 412.5e9
    assert infeasible["infeasible"]["smallest"][1] == {"gpu": "h200-141g", "gpus": 16}
    assert infeasible["infeasible"]["options"] == ["16 x b200-180g", "spec.training.batchSize: 128"]
    assert not infeasible["pools"]


@pytest.mark.parametrize("columns", [80, 100])
@each_mapping
def test_the_text_names_everything_and_cuts_nothing(mapping: DeviceMapping, columns: int) -> None:
    text = text_of(mapping, columns)
    words = " ".join(text.split())
    assert text.startswith("a [job] of PPO\n")
    assert "\x1b" not in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= columns
    for pool in mapping.pools:
        assert pool.name in words
        assert f"{', '.join(pool.models)} {pool.size}" in words
    for role, sizes in mapping.sizes.items():
        assert f"{role} {sizes}" in words
    for placement in mapping.rejected:
        assert placement.reason in words
    assert all(f"{stage} " in words for stage in STAGES)


def test_the_text_shows_memory_times_and_what_others_take_longer() -> None:
    lines = [" ".join(line.split()) for line in text_of(COLOCATED, 100).splitlines()]
    assert "actor 1-8-2 1-2-4 8 Optimizer 412 ms 31.3 s 2.9 s 24.7 s" in lines
    assert "all, limit 76.5 GB" in lines
    (generation,) = [line for line in lines if line.startswith("generation 39.0 █")]
    assert generation.endswith("51% 2.6 2.6 15.6 5.2 13.0")
    assert "predicted: 91.3 s (68.5 to 137) a step, 22,967 tokens/s" in lines
    assert "by stage: generation 31.7 s, preparation 11 s, training 48.6 s" in lines
    assert any(line.startswith(f"96.1 s +5.2% actor, critic, reward on 12{TIMES}a100-80g; reference") for line in lines)
    assert any("memory of a CPU slot in MB" in line for line in text_of(LAPTOP, 80).splitlines())


def test_a_number_stays_with_its_unit_where_there_is_little_room() -> None:
    lines = text_of(SPLIT, 60).splitlines()
    assert max(map(len, lines)) <= 60
    assert any(line.split() == ["cost_critic", "2-8-2", "8", "Parameters"] for line in lines)
    assert any(line.split() == ["cost_critic", "5.2", "s", "61", "s"] for line in lines)
    assert any(line.split() == ["generation", "46.5", "3.1", "3.1", "18.6", "6.2", "15.5"] for line in lines)
    assert not [line for line in lines if line.split()[:1] in (["s"], ["ms"], ["GB"])]
    assert any(line.startswith("  by phase: reshard 1.2 s") for line in lines)
    assert not any("of limit" in line for line in lines), "the bar of memory"


def test_prices_are_those_of_a_step() -> None:
    console = Console(width=100, file=io.StringIO())
    explain(SPLIT, title="", console=console, prices={"a100-80g": 2.0, "h100-80g": 3.0})
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "a step, 10,816 tokens/s, price 17.2 a step" in text, "(64 x 3 + 64 x 2) x 193.9 / 3600"
    assert "price 17.4: actor, reference on 64" in text
    assert "price" not in text_of(SPLIT, 100)


def test_the_chart_shows_short_phases_and_who_waits() -> None:
    rows = [line for line in text_of(SPLIT, 80).splitlines() if "░▓" in line or "▒" in line]
    actor = next(row for row in rows if "actor" in row)
    assert "░▓▓▓" in actor  # 1.2 s of 194 s are still seen
    assert actor.rstrip().endswith("██····    86%")
    reference = next(row for row in rows if row.split()[:2] == ["reference", "reference"])
    assert reference.count("·") > 30
    assert "·" not in text_of(COLOCATED, 80)


def test_a_mapping_without_prediction_shows_pools_and_cuts() -> None:
    text = text_of(UNKNOWN, 80)
    assert "actor, reference, reward" in text
    assert "reference  1-1-2" in text
    assert "timeline" not in text


def test_what_is_short_and_what_would_do_is_said() -> None:
    words = " ".join(text_of(TOO_BIG, 80).split())
    assert TOO_BIG.reason in words
    assert "412.5 GB" in words
    assert f"16{TIMES}b200-180g or spec.training.batchSize: 128 or 24{TIMES}a100-80g or 16{TIMES}h200-141g" in words


def test_explaining_loads_no_runtime() -> None:
    modules = "rlhf_mapper.mapping, rlhf_planning.mapping_text, rlhf_planning.graph_text"
    check = f"import sys, {modules}; assert not {{'torch', 'ray', 'vllm', 'matplotlib'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_rejected_placements_count_cpu_slots_and_gpus_by_name() -> None:
    job = job_of("PPO", training={"promptBatchSize": 16, "miniBatchSize": 16})
    ends = set()
    for gpu, device in (("cpu-slot", "CPU"), ("h100-80g", "GPU")):
        found = auto_map(job, cluster_of((gpu, 1, 2)), shapes_of(job, TINY), device=cast(Device, device))
        assert isinstance(found, DeviceMapping)
        ends |= {each.reason.rpartition(" on ")[2] for each in found.rejected if "all wait for" in each.reason}
    assert ends == {"1 CPU slot", "1 GPU"}
