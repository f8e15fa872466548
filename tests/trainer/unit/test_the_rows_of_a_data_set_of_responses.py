"""What a job of Generate writes of the responses to a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlhf_api.chain import in_order
from rlhf_api.files import dump
from rlhf_api.job import Job
from rlhf_api.measures import pass_sizes
from rlhf_api.problems import SpecError
from rlhf_api.spec.algorithms import Writing
from rlhf_planning.command_line import uri_of
from rlhf_trainer import spmd
from rlhf_trainer.algorithms.generate import Generate
from rlhf_trainer.data.lines import files_of
from rlhf_trainer.data.order import Order
from rlhf_trainer.data.uri import local_path
from rlhf_trainer.errors import DataError, EnvironmentProblem, NumericsError
from rlhf_trainer.ops.pass_at_k import pass_at
from rlhf_trainer.run.preconditions import is_written
from rlhf_trainer.run_folder.folder import JobFolder, finished_jobs, with_written_data
from rlhf_trainer.training import distributed
from rlhf_trainer.types import Batch
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.responses import ResponseWriter, require_finite, rows_of
from rlhf_trainer.workers.samples import as_bytes
from tests.api.cases import made
from tests.each import each_case
from tests.trainer.tiny import EXAMPLE_MODEL


def asked(**options: Any) -> Writing:
    return Generate(name="Generate", **options)


def response(text: str, reward: float, *, finished: bool = True) -> dict[str, Any]:
    known = {"prompt": "p", "answer": "7", "reward": reward, "finished": finished}
    return {**known, "response": text, "response_tokens": len(text), "sample": 0}


GROUP = [response("bad", 0.0), response("good", 1.0), response("cut", 2.0, finished=False), response("also", 1.0)]


def texts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["response"] for row in rows]


def test_all_responses_are_rows_unless_their_reward_is_too_low() -> None:
    assert texts(rows_of(asked(), GROUP)) == ["bad", "good", "cut", "also"]
    assert texts(rows_of(asked(min_reward=1.0), GROUP)) == ["good", "cut", "also"]


def test_the_best_has_ended_by_itself_and_is_the_first_of_equals() -> None:
    assert texts(rows_of(asked(rows="Best"), GROUP)) == ["good"]
    assert rows_of(asked(rows="Best", min_reward=1.5), GROUP) == []
    assert rows_of(asked(rows="Best"), [response("cut", 2.0, finished=False)]) == []


def test_a_pair_is_the_best_and_the_worst_with_what_they_share() -> None:
    pairs = asked(rows="Pairs")
    expected = {"prompt": "p", "answer": "7", "chosen": "good", "rejected": "bad"}
    assert rows_of(pairs, GROUP[:2]) == [{**expected, "chosen_reward": 1.0, "rejected_reward": 0.0}]
    (row,) = rows_of(pairs, GROUP)
    assert row["rejected"] == "cut", "one that has not ended is worse than each that has"
    assert rows_of(pairs, [GROUP[1], GROUP[3]]) == [], "neither is better"
    assert rows_of(asked(rows="Pairs", min_reward=2.0), GROUP) == []


def test_the_prompts_stay_in_the_order_of_the_file() -> None:
    order = Order(counts=(5,), weights=(1.0,), seed=None)
    assert order.at(np.arange(7)).tolist() == [0, 1, 2, 3, 4, 0, 1]


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    assert pass_sizes(1) == []
    assert pass_sizes(6) == [2, 4, 6]
    assert pass_at(2, samples=4, passed=1) == pytest.approx(1 - 3 / 6)
    assert pass_at(4, samples=4, passed=0) == 0
    assert pass_at(2, samples=4, passed=3) == 1


def job(base: str, name: str, *overrides: str) -> Job:
    return Job.parse({**made(base, overrides), "metadata": {"name": name}})


@each_case(
    ("overrides", "problem"),
    [
        (["data.train.columns=[reward]"], "data.train.columns: reward"),
        (["data.train.toolsKey=response"], "data.train.toolsKey: response"),
        (["data.train={mix: [{uri: hf://a}, {uri: hf://b, toolsKey: prompt}]}"], "data.train.mix.1.toolsKey: prompt"),
        (["data.train.promptKey=question", "data.train.columns=[prompt]"], "data.train.columns: prompt"),
        (["models.reward={verifier: {name: Math, answerKey: sample}}"], "models.reward: sample"),
    ],
)
def test_a_column_may_not_have_the_name_of_what_is_written(overrides: list[str], problem: str) -> None:
    with pytest.raises(SpecError, match=f"^spec.{problem} is a column of what Generate writes$"):
        job("Generate", "g", *overrides)


def test_a_column_may_have_any_other_name() -> None:
    job("Generate", "g", "data.train.columns=[chosen, prompt]", "data.train.toolsKey=tools")


def test_a_job_comes_after_those_that_write_its_data() -> None:
    reads = job("SFT", "sft", "data.train={mix: [{uri: job://g, responseKey: response}, {uri: hf://x}]}")
    writes = job("Generate", "g")
    assert [each.name for each in in_order([reads, writes], {})] == ["g", "sft"]
    with pytest.raises(SpecError, match=r"^sft: spec.data.train.mix.0.uri: .* is a job of SFT, expected Generate"):
        in_order([reads], {"g": "SFT"})
    with pytest.raises(SpecError, match=r"spec.models.actor.uri: .* is a job of Generate, expected SFT"):
        in_order([writes, job("SFT", "sft", "models.actor.uri=job://g")], {})


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_ends_the_job(reward: float) -> None:
    require_finite({"response": "no reward is asked for"})
    with pytest.raises(
        NumericsError, match=r"^spec.models.reward: gives (nan|inf) to a response: the model is broken$"
    ):
        require_finite(response("a", reward))


def test_a_row_has_the_columns_that_the_job_names(tmp_path: Path) -> None:
    made = ResponseWriter(
        WorkerSetting(
            job=(one := job("Generate", "g", "data.train.columns=[answer]")),
            role="actor",
            model=one.models()["actor"],
            folder=str(EXAMPLE_MODEL),
            total_steps=1,
        ),
        folder=str(tmp_path),
        columns=("answer",),
    )
    one_token = {name: torch.ones(1, 2) for name in ("attention_mask", "response_mask")} | {"finished": torch.ones(1)}
    given = {"columns": as_bytes([{"answer": 7, "question": "q"}]), "raw_prompts": as_bytes([{"prompt": "q"}])}
    row = made._row(Batch(step=1, start=0, size=1, fields={**one_token, **given, "tokens": torch.ones(1, 2).long()}), 0)
    assert row.keys() == {"answer", "prompt", "response", "finished", "response_tokens", "sample"}


def writer(file: Path) -> ResponseWriter:
    found = object.__new__(ResponseWriter)
    found._file = file
    return found


def test_rows_after_a_checkpoint_go_also_without_earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    file = tmp_path / "responses.jsonl"
    writer(file).set_counters(counters={"bytes": 0, "sums": {}})
    assert not file.exists()
    file.write_text("later\n")
    writer(file).set_counters(counters={"bytes": 0, "sums": {}})
    assert file.read_text() == ""
    with pytest.raises(EnvironmentProblem, match="has 0 bytes, but 9 were written up to the checkpoint"):
        writer(file).set_counters(counters={"bytes": 9, "sums": {}})


def test_a_path_becomes_an_address_that_leads_back_to_it(tmp_path: Path) -> None:
    file = tmp_path / "a%20b #1.jsonl"
    file.touch()
    assert local_path(uri_of(str(file))) == file
    assert uri_of("hf://a/b") == "hf://a/b"


def begun(output: Path, name: str) -> JobFolder:
    folder = JobFolder(output, job("Generate", name))
    folder.begin(None, inputs={})
    return folder


def test_data_of_a_job_is_read_from_the_run_folder(tmp_path: Path) -> None:
    reads = job("PPO", "rl", "data.train.uri=job://g", "evaluation={data: {uri: job://h}}")
    first = begun(tmp_path, "g")
    first.made.mkdir(exist_ok=True)
    (first.made / "responses.jsonl").write_text("{}\n")
    first.add_evidence(made={"name": "data", "kind": "data", "uri": first.made.as_uri()})
    first.succeed()
    assert [file.name for file in files_of(first.made)] == ["responses.jsonl"], "a later job reads all files"
    written = begun(tmp_path, "h")
    made = {name: done.identity for name, done in finished_jobs(tmp_path).items()} | {"h": "h"}
    assert not is_written(reads, tmp_path, made), "not all of its rows are there"
    with pytest.raises(DataError, match=r"^rl: spec.evaluation.data.uri: job://h has not been written; run its job"):
        with_written_data(reads, tmp_path)
    written.succeed()
    made = {name: done.identity for name, done in finished_jobs(tmp_path).items()}
    assert is_written(reads, tmp_path, made)
    found = with_written_data(reads, tmp_path).spec
    assert found.data.train.sources("")[""].address == (tmp_path / "g" / "data").as_uri()
    assert found.evaluation
    assert found.evaluation.data.sources("")[""].address == (tmp_path / "h" / "data").as_uri()


def test_torchrun_notes_the_job_as_its_manifest_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path, "g").succeed()
    model = "package://rlhf_examples/arithmetic/model"
    reads = job("SFT", "sft", "data.train.uri=job://g", f"models.actor.uri={model}")
    (tmp_path / "sft.yaml").write_text(dump(reads))
    trained: list[str] = []

    def run_rank(running: Job, *_: object, **__: object) -> dict[str, Any]:
        trained.extend(source.address for source in running.spec.data.train.sources("").values())
        return {}

    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(spmd, "run_rank", run_rank)
    monkeypatch.setattr(spmd, "require_ready", lambda *_: None)
    monkeypatch.setattr(distributed, "start", lambda *_: 0)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    spmd.run_program("sft", tmp_path / "sft.yaml", tmp_path, [])
    assert trained == [(tmp_path / "g" / "data").as_uri()]
    assert "uri: job://g" in (tmp_path / "sft" / "job.yaml").read_text(), (
        "else rlhf run takes it for another experiment"
    )
