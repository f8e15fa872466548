"""A job whose mapping came with a prediction leaves mapping.json, says so, and its page compares both."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rlhf_mapper.mapping import DeviceMapping, as_json
from rlhf_trainer.outputs.display import Display
from rlhf_trainer.run.placement import Placed
from rlhf_trainer.run.publisher import Publisher
from rlhf_trainer.run_folder.folder import JobFolder
from tests.mapper.example_mappings import COLOCATED, LAPTOP, SPLIT, UNKNOWN
from tests.trainer.report.conftest import PPO, page_of, ppo_record, run_job

TITLE = "Predicted and measured"


def told(folder: JobFolder, mapping: DeviceMapping) -> str:
    """What the terminal shows when a job with this mapping starts."""
    console = Console(file=StringIO(), width=200)
    Publisher(PPO, folder, Display(console)).say(*Placed(mapping).notes)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "mapping", [COLOCATED, SPLIT, LAPTOP, UNKNOWN], ids=["colocated", "split", "laptop", "unknown"]
)
def test_every_job_leaves_its_mapping(tmp_path: Path, mapping: DeviceMapping) -> None:
    folder = run_job(tmp_path, PPO, [], mapping)
    assert json.loads((folder.path / "mapping.json").read_text()) == as_json(mapping)


def test_a_prediction_is_told_in_a_line_of_terminal_and_events(tmp_path: Path) -> None:
    folder = run_job(tmp_path, PPO, [])
    assert told(folder, LAPTOP) == "helpful-ppo: mapped: 1 pool, predicted 593 ms (445 to 890) a step\n"
    assert "Z mapped: 1 pool, predicted 593 ms (445 to 890) a step\n" in (folder.path / "events.log").read_text()
    assert told(folder, SPLIT).startswith("helpful-ppo: mapped: 4 pools, predicted ")
    assert told(folder, UNKNOWN) == ""


def test_the_page_compares_each_phase_and_the_step(tmp_path: Path) -> None:
    records = [{**ppo_record(1), "time/step": 40.0}, *map(ppo_record, range(2, 4))]
    run_job(tmp_path, PPO, records, COLOCATED)
    page = page_of(tmp_path)
    assert COLOCATED.prediction
    assert COLOCATED.prediction.phases["update"] == pytest.approx(48.6)
    assert TITLE in page.sections["helpful-ppo"]
    assert page.row("update", "49 s") == ["update", "49 s", "1 s", "0.02"]
    assert page.row("generation", "31 s") == ["generation", "31 s", "500 ms", "0.02"]
    assert page.row("whole step")[2] == "2 s", "the median, not the mean"
    assert not [row for row in page.cells if row[0] == "scoring"], "it was not measured"
    line = "16 x a100-80g: actor 1-8-2, generation 1-2; critic 1-8-2; reference 1-4-4; reward 1-2-8."
    assert line in page.sections["helpful-ppo"]


def test_pools_are_told_apart(tmp_path: Path) -> None:
    run_job(tmp_path, PPO, [ppo_record(1)], SPLIT)
    assert page_of(tmp_path).sections["helpful-ppo"].count(" | ") == 3


@pytest.mark.parametrize("steps", [[], [1]], ids=["before the first step", "without a prediction"])
def test_without_both_sides_there_is_nothing_to_compare(tmp_path: Path, steps: list[int]) -> None:
    run_job(tmp_path, PPO, map(ppo_record, steps), UNKNOWN if steps else COLOCATED)
    assert TITLE not in page_of(tmp_path).sections["helpful-ppo"]


POOL = '{"gpus": 2, "gpu": "H100", "models": ["reward"]}'


@pytest.mark.parametrize(
    "damaged", ['{"schema_ver', f'{{"pools": [{POOL}], "models": {{}}}}'], ids=["torn", "no sizes"]
)
def test_a_damaged_mapping_is_named_and_the_rest_is_shown(tmp_path: Path, damaged: str) -> None:
    folder = run_job(tmp_path, PPO, [ppo_record(1)])
    (folder.path / "mapping.json").write_text(damaged)
    text = page_of(tmp_path).sections["helpful-ppo"]
    assert "mapping.json cannot be read" in text
    assert "bytes/controller" in text
