"""Budget, deadline and seconds of a step choose a row; what nothing meets, and what may fail, is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf_planning.sized_job import seconds_of, tokens_of
from rlhf_trainer.commands.cli import app
from tests.each import each_case
from tests.planning.sized import MISTAKE, UNFIT, answer, ask

JOB = "7b --response 4k --mean 1500 --gpus h100"


def test_a_deadline_takes_the_cheapest_that_is_surely_in_time() -> None:
    free, bound = answer(JOB), answer(f"{JOB} --deadline 5h")
    assert free["why"] == "the cheapest"
    assert free["chosen"]["hours_high"] > 5 > bound["chosen"]["hours_high"]
    in_time = [row for row in bound["rows"] if row["hours_high"] <= 5]
    assert bound["chosen"]["cost"] == min(row["cost"] for row in in_time)
    assert bound["why"] == "the cheapest within 5 h, its whole interval too"


def test_a_deadline_inside_the_interval_is_said() -> None:
    (row,) = answer(f"{JOB}=8")["rows"]
    between = (row["hours"] + row["hours_high"]) / 2
    assert "by the prediction; the high end of its interval is not" in ask(f"{JOB}=8 --deadline {between:.2f}h")


def test_a_budget_takes_the_fastest_and_counts_its_steps() -> None:
    found = answer(f"{JOB} --budget 200")
    assert found["why"] == "the fastest within 200 USD, its whole interval too"
    sure = [row for row in found["rows"] if row["cost"] * row["high"] / row["step_seconds"] <= 200]
    assert found["chosen"]["hours"] == min(row["hours"] for row in sure)
    steps = int(200 / (found["chosen"]["cost"] / 200))
    assert f"200 USD buy about {steps:,} steps on it" in ask(f"{JOB} --budget 200")


@pytest.mark.parametrize(
    ("limits", "words"), [("--budget 1", "1 USD"), ("--deadline 1min --budget 5", "5 USD and 1 min")]
)
def test_what_nothing_meets_has_a_nearest(limits: str, words: str) -> None:
    found = answer(f"{JOB} {limits}")
    assert found["why"] == f"the nearest to {words}, which nothing here meets"
    assert found["chosen"] in found["rows"]


def test_a_type_on_which_nothing_fits_is_named() -> None:
    found = answer("llama-3.1-405b --response 16k --gpus t4", UNFIT)
    assert (found["rows"], found["chosen"], found["files"]) == ([], None, {})
    assert found["unfit"] == ["t4-16g: does not fit on up to 256"]
    assert "The job fits on none of the hardware that was asked for." in ask("405b --gpus t4", UNFIT)


def test_a_type_without_a_price_is_sized_by_gpu_hours() -> None:
    found = answer("7b --gpus mi300x")
    assert {row["cost"] for row in found["rows"]} == {None}
    assert found["why"] == "the fewest GPU hours"
    assert "no price" in ask("7b --gpus mi300x")
    assert answer("7b --gpus a100-pcie-40g")["rows"], "a type of which the market knows nothing"
    assert "which nothing here meets, as without a price none meets a budget" in ask("7b --gpus mi300x --budget 9")


def test_a_picture_without_a_price_or_row_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sized.png"
    assert "shows hours against money, and no row has a price" in ask(f"7b --gpus mi300x --png {file}", UNFIT)
    assert "drawn" not in ask(f"405b --gpus t4 --png {file}", UNFIT)
    assert not file.exists()


def test_the_smallest_of_two_types_is_the_cheaper_job() -> None:
    found = answer("1.5b --response 4k --mean 1200 --gpus a100=1,h100=1")
    assert found["smallest"] == min(found["rows"], key=lambda row: float(row["cost"]))


def test_a_narrow_terminal_shows_every_number() -> None:
    env = {"COLUMNS": "60", "FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}
    told = CliRunner(env=env).invoke(app, ["size", "7b", "--gpus", "h100"]).output
    shown = [line.split()[:2] for line in re.sub(r"\x1b\[\d*m", "", told).splitlines() if "h100-80g  " in line]
    assert ["128", "h100-80g"] in shown
    assert "\u2026" not in told


def test_what_cannot_be_written_is_not_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = ask(f"meta-llama/Llama-3.1-8B --gpus h100=8 --output {tmp_path}/file", UNFIT)
    assert "cannot be written" in told
    assert "has this layout" not in told
    assert " meta-llama/Llama-3.1-8B has the shape of " in ask("meta-llama/Llama-3.1-8B --gpus h100=8")


def test_what_a_model_reads_limits_the_lengths(tmp_path: Path) -> None:
    assert f"MODEL {tmp_path}/config.json: cannot be read: No such file" in ask(str(tmp_path), MISTAKE)
    sizes = '"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "intermediate_size": 5632'
    config = f'{{"model_type": "llama", {sizes}, "vocab_size": 32000, "max_position_embeddings": 2048}}'
    (tmp_path / "config.json").write_text(config)
    told = ask(f"{tmp_path} --response 2k --gpus h100=8", MISTAKE)
    assert f"--prompt and --response: are 3072 tokens together, but {tmp_path.name} reads 2048 at most" in told
    assert answer(f"{tmp_path} --response 1k --gpus h100=8")["chosen"]
    assert "17408 tokens together, but llama-2-7b reads 4096 at most" in ask("llama-2-7b --response 16k", MISTAKE)


def test_the_host_memory_of_every_row_is_said() -> None:
    told = ask("32b --response 8k --gpus h100=8,h200=16 --step-time 600")
    assert "> 16 x h200-141g" in told, "a row that keeps all on its GPUs"
    assert "Nodes of h100-80g are taken to have 275 GB of host memory for each GPU." in told


def test_a_setting_that_changes_nothing_is_named() -> None:
    told = ask("8b --gpus h100=4 --set training.seed=3 --set training.totalSteps=100")
    assert "--set training.seed=3 changes nothing of this answer" in told
    assert "--set training.totalSteps" not in told


def test_the_host_memory_of_worker_pods_is_counted() -> None:
    pods = "8b --gpus h100=1 --set runtime.worker.memory"
    told = ask(f"{pods}=64Gi", UNFIT)
    assert "half of the host memory, 34.4 GB, is too small" in told
    least = told.partition(" GB of host memory for each GPU (for all of a node: spec.runtime.worker.memory")[
        0
    ].rpartition(" ")[2]
    assert answer(f"{pods}={least}G")["chosen"]["gpus"] == 1


def test_an_interruption_costs_half_an_interval_and_a_restart() -> None:
    told = ask(f"{JOB}=8 --set spec.checkpoint.everyMinutes=30")
    assert f"USD, and {25 / 60 * 8 * 0.80:.2f} more for each interruption: half of the 30 minutes" in told


@each_case(
    ("question", "sentence"),
    [
        ("7b --gpus h1000", "--gpus: h1000 is no known GPU; did you mean h100?"),
        ("7b --gpus nothing", "t4 or t4-16g. An --inventory of `rlhf plan` describes others"),
        ("7b --gpus any,h100", "--gpus: is any,h100; any stands alone, and means all GPU types with a price"),
        ("7b --gpus h100=many", "--gpus: h100=many has no number of GPUs from 1 to 16384"),
        ("qwen3-33b", "did you mean qwen3-32b?"),
        ("5000b", "is far from all dense models of the table; the nearest is llama-3.1-405b"),
        ("7b --algorithm GRP", "--algorithm: is GRP; did you mean GRPO?"),
        ("7b --response lots", "--response: is lots, expected a number of tokens, such as 16k"),
        ("7b --response 1k --mean 2k", "--mean: is 2048, above the limit of 1024 (--response)"),
        ("7b --algorithm SFT --samples 4", "--samples: is for RL only, SFT generates no responses"),
        ("7b --mean 0.2", "--mean: is 0.2, expected a number of tokens"),
        (f"7b --response {'9' * 400}", "expected a number of tokens, such as 16k"),
        ("7b --step-time 0", "--step-time: is 0, expected a duration, such as 48h, 2min or 90s"),
        ("~no-such-user/model", "MODEL ~no-such-user/model: is neither a folder nor one of the table's models"),
        ("m" * 300, "is neither a folder nor one of the table's models"),
        (
            "7b --set spec.training.totalSteps=null --set spec.training.totalEpochs=1",
            "spec.training.totalSteps: is missing",
        ),
        ("7b --deadline soon", "--deadline: is soon, expected a duration, such as 48h, 2min or 90s"),
        ("7b --set spec.training.nonsense=1", "spec.training.nonsense: unknown field"),
    ],
)
def test_a_mistake_is_a_sentence_with_close_names(question: str, sentence: str) -> None:
    assert sentence in ask(question, MISTAKE)


def test_a_price_list_that_is_none_says_what_one_is(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    for text in ("h100: cheap", "- 3", "h100: -1", "", "h100: .inf", "h100: true"):
        file.write_text(text)
        assert "write lines such as `h100: 2.5`" in ask(f"7b --prices {file}", MISTAKE)
    file.write_text("h100: 3\nh100-80g: 4")
    assert "has several prices of one GPU type" in ask(f"7b --prices {file}", MISTAKE)
    file.write_text("h101: 3")
    assert "h101 is no known GPU; did you mean h100?" in ask(f"7b --prices {file}", MISTAKE)


def test_numbers_of_tokens_and_durations_are_read() -> None:
    assert [tokens_of(text, "") for text in ("16k", "600", "1.5K")] == [16384, 600, 1536]
    assert [seconds_of(text, "") for text in ("48h", "2min", "90", "1.5 h", "3d")] == [172800, 120, 90, 5400, 259200]
