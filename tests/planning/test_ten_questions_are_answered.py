"""Ten questions that people ask before they buy GPUs; each answer fits, is counted rightly and says how sure it is."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.files import load
from tests.planning.sized import MISTAKE, UNFIT, answer, ask

LONG = "32b --algorithm GRPO --response 16k --steps 200"


def holds_together(found: dict[str, Any], steps: int) -> None:
    """Hold each row to its own arithmetic: seconds to hours, hours to money, an interval around both, a manifest."""
    assert found["rows"]
    for row in found["rows"]:
        assert row["low"] < row["step_seconds"] < row["high"]
        assert row["hours_low"] < row["hours"] < row["hours_high"]
        assert row["hours"] == pytest.approx(steps * row["step_seconds"] / 3600)
        assert row["cost"] == pytest.approx(row["hours"] * row["gpus"] * row["price_per_gpu_hour"])
        assert row["free_bytes"] > 0
    assert found["chosen"] in found["rows"]
    (job,) = load(found["files"]["job.yaml"]["text"])
    pools = job.spec.placement.pools
    assert sum(pool.nodes * pool.slots_per_node for pool in pools) <= found["chosen"]["gpus"]


def test_what_a_32b_with_16k_responses_needs_and_costs() -> None:
    found = answer(LONG)
    holds_together(found, steps=200)
    costs, hours = ([row[name] for row in found["rows"]] for name in ("cost", "hours"))
    assert costs == sorted(costs)
    assert hours == sorted(hours, reverse=True), "a dearer row that is no faster is not on the front"
    assert found["chosen"] == found["rows"][0]
    assert found["smallest"]["gpus"] <= min(row["gpus"] for row in found["rows"])
    assert "qwen3-32b" in found["found"]


def test_real_lengths_cost_less_than_the_longest() -> None:
    known = answer(f"{LONG} --mean 3k")
    holds_together(known, steps=200)
    assert known["chosen"]["cost"] < answer(LONG)["chosen"]["cost"]
    assert "responses of at most 16,384, counted as 3,0" in ask(f"{LONG} --mean 3k")


def test_whether_it_fits_on_one_node() -> None:
    found = answer(f"{LONG} --gpus h200=8")
    holds_together(found, steps=200)
    assert [(row["gpu"], row["gpus"], row["nodes"]) for row in found["rows"]] == [("h200-141g", 8, 1)]
    refused = answer("70b --response 16k --gpus a100-40g=8", UNFIT)
    assert "8 x a100-40g: does not fit: the states of actor, reference take" in refused["unfit"][0]
    assert "spec.models.actor.lora: {rank: 16} or " in refused["unfit"][0]
    assert refused["chosen"]["gpus"] > 8


def test_an_8b_on_one_h100_fits_by_its_host_memory() -> None:
    found = answer("8b --response 2k --mean 600 --gpus h100=1")
    holds_together(found, steps=200)
    row = found["chosen"]
    assert (row["gpus"], "optimizer on host" in row["tight"]) == (1, True)
    assert [name.partition(" (")[0] for name in row["instances"]] == ["AWS p5.4xlarge"], "others have less host memory"
    assert "Nodes of h100-80g are taken to have 275 GB of host memory for each GPU." in ask("8b --gpus h100=1")
    refused = answer("14b --gpus h100=1", UNFIT)
    (sentence,) = refused["unfit"]
    assert "GB, but 1 x h100-80g hold 81.1 GB, and half of the host memory, 137.5 GB, is too small" in sentence
    assert sentence.endswith(f" or {refused['chosen']['gpus']} x h100-80g would do")


def test_two_4090_train_a_small_model() -> None:
    found = answer("1.5b --response 2k --mean 600 --gpus 4090=2")
    holds_together(found, steps=200)
    assert (found["chosen"]["gpu"], found["chosen"]["gpus"]) == ("rtx-4090-24g", 2)
    assert found["chosen"]["cost"] < 100


def test_a_70b_with_lora_fits_on_one_node() -> None:
    found = answer("70b --lora 16 --response 2k --mean 600 --gpus h100=8")
    holds_together(found, steps=200)
    assert found["chosen"]["gpus"] == 8
    (job,) = load(found["files"]["job.yaml"]["text"])
    assert (lora := job.models()["actor"].lora)
    assert (lora.rank, lora.alpha) == (16, 32)
    assert answer("70b --lora 16 --gpus h100=8")["chosen"]["step_seconds"] > found["chosen"]["step_seconds"]


def test_how_many_gpus_two_minutes_a_step_take() -> None:
    found = answer("7b --response 4k --mean 1500 --gpus h100 --step-time 2min")
    holds_together(found, steps=200)
    curve = sorted((row["gpus"], row["step_seconds"], row["high"]) for row in found["rows"])
    assert len(curve) > 3
    assert all(one[1] > other[1] for one, other in itertools.pairwise(curve))
    assert found["chosen"]["gpus"] == min(gpus for gpus, _, high in curve if high <= 120)
    assert found["why"] == "the fewest GPUs within 120 s a step, its whole interval too"


def test_two_types_stand_side_by_side() -> None:
    found = answer("7b --response 4k --mean 1500 --gpus a100,h100")
    holds_together(found, steps=200)
    seconds = {(row["gpu"], row["gpus"]): row["step_seconds"] for row in found["rows"]}
    both = {gpus for gpu, gpus in seconds if gpu == "a100-80g"} & {gpus for gpu, gpus in seconds if gpu == "h100-80g"}
    assert len(both) > 2
    assert all(seconds["h100-80g", gpus] < seconds["a100-80g", gpus] for gpus in both)


def test_the_cheapest_way_by_own_prices(tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("h100: 3.0\na100: [1.2, 0.6]\nl40s: 0.9\nh200: 3.5\n")
    found = answer(f"7b --response 4k --mean 1500 --prices {prices}")
    holds_together(found, steps=200)
    given = {"h100-80g": 3.0, "a100-80g": 1.2, "l40s-48g": 0.9, "h200-141g": 3.5}
    assert all(row["price_per_gpu_hour"] == given[row["gpu"]] for row in found["rows"])
    assert found["chosen"]["cost"] == min(row["cost"] for row in found["rows"])
    cheap = tmp_path / "cheap.yaml"
    cheap.write_text("h100: 3.0\na100: [0.2, 0.1]\nl40s: 0.9\nh200: 3.5\n")
    changed = answer(f"7b --response 4k --mean 1500 --prices {cheap}")
    assert (changed["chosen"]["gpu"], changed["chosen"]["spot_cost"]) == (
        "a100-80g",
        pytest.approx(changed["chosen"]["cost"] / 2),
    )


def test_a_model_of_the_hub_needs_its_config_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = ask("some-org/new-model-9b", MISTAKE)
    assert "nothing is fetched: pass a folder with its config.json" in told
    monkeypatch.chdir(tmp_path)
    sizes = '"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8'
    Path("config.json").write_text(
        f'{{"model_type": "llama", {sizes}, "intermediate_size": 14336, "vocab_size": 128256}}'
    )
    found, known = answer(". --gpus h100=8"), answer("llama-3.1-8b --gpus h100=8")
    holds_together(found, steps=200)
    assert found["model"]["parameters"] == known["model"]["parameters"]
    assert found["chosen"]["step_seconds"] == known["chosen"]["step_seconds"]
    assert answer("meta-llama/Llama-3.1-8B-Instruct --gpus h100=8")["chosen"] == known["chosen"]


def test_a_generation_that_cannot_be_is_refused() -> None:
    assert "spec.models.actor: is a deepseek_v3, whose layout in vLLM this trainer" in ask("deepseek-v3", MISTAKE)
    assert "671 G parameters, of which 37.6 G are active" in ask("deepseek-v3 --algorithm SFT --gpus h100=8", UNFIT)
